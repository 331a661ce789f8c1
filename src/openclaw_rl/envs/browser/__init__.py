"""Episodes in a real browser: what a page shows, the actions on it, and tasks with a check."""
