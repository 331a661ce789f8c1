"""A run as pages: live, served by the server itself, and in a file (`openclaw-rl report`)."""
