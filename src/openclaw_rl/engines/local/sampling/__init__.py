"""Draws tokens: pages of keys and values, scheduling, batches."""
