"""The result of a test, whichever runner ran it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TestResult:
    """What became of a test."""

    passed: bool
    problem: str = ""
    """What is wrong, in a sentence; empty if it passed."""
    loaded: bool = True
    """Whether its file could be loaded, and with it the code that it tests."""
