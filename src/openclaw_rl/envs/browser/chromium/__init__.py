"""Chromium: how it is found, started, kept alive, and kept from leaving a task."""
