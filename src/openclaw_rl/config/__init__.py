"""How options are defined, read and shown."""
