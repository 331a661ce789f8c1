"""How many examples a property is tried with: some in `make test`, all in every other run."""

from typing import Any

import hypothesis

#: A property without a number of its own is tried with so many examples.
USUAL = 100
#: `make test` tries this share of the examples of each property, but not fewer than FEWEST. `make test-more` tries all.
SHARE = 4
FEWEST = 15
#: The names of the profiles of hypothesis.
ALL, SOME = "all", "some"


def register() -> None:
    # A busy machine must not fail a test.
    hypothesis.settings.register_profile(ALL, deadline=None, max_examples=USUAL)
    hypothesis.settings.register_profile(SOME, deadline=None, max_examples=some(USUAL))


def some(number: int) -> int:
    return min(number, max(FEWEST, number // SHARE))


def tries_all() -> bool:
    return hypothesis.settings.get_current_profile_name() == ALL


def examples(number: int, **others: Any) -> hypothesis.settings:
    """Settings, also as a decorator: so many examples, or a share of them. `others` are further settings."""
    return hypothesis.settings(max_examples=number if tries_all() else some(number), **others)
