"""Answers that fit a schema: grammars, and which tokens they allow."""
