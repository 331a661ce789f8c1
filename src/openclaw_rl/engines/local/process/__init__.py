"""The worker processes, seen from both sides."""
