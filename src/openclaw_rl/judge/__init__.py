"""Reads what came after a response, and says how good the response was and what would have made it better."""
