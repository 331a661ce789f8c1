"""Turns verdicts into gradient steps, and steps into a policy that serves."""
