"""Helpers that tests share: fakes, doubles and builders. No test module imports another."""
