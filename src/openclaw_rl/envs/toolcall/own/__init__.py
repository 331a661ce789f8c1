"""Tools and tasks that a user defines in a file (`--tools-config`)."""
