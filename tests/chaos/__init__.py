"""Attacks on a running server, too long for the tests: `make test-chaos`. One module is one scenario."""
