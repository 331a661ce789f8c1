"""Computes gradients and makes steps."""
