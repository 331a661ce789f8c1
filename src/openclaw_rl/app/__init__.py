"""Puts the parts together and runs them as one server."""
