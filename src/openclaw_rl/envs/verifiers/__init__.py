"""Environments of the `verifiers` package, run by an interpreter that has it."""
