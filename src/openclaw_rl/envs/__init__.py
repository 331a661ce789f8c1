"""Environments: where episodes are run and rewarded."""
