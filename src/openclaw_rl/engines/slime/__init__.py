"""slime as an outside trainer: which command starts it."""
