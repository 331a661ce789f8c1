"""Builds the parts from the options and runs them as one server."""
