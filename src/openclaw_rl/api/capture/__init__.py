"""Turns answered requests into turns of the ledger."""
