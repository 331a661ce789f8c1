"""Evaluations: what a model can do, and how well it does what its users want."""
