"""A trainer outside this program, which claims judged turns over HTTP."""
