"""Text ends before the first stop string, wherever the pieces' borders are."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openclaw_rl.rendering.response import StopMatcher
from support.properties import examples

# Few letters, so that stop strings appear, nearly appear, overlap, and contain each other.
texts = st.text("ab\n", max_size=24)
stop_strings = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
cuts = st.sets(st.integers(0, 24))


def match(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    """What comes through, and whether a stop string ended it."""
    matcher = StopMatcher(stops)
    text = "".join([*map(matcher.push, pieces), matcher.flush()])
    return text, matcher.stopped


def cut(text: str, at: set[int]) -> list[str]:
    edges = [0, *sorted(position for position in at if position < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(stop_strings, texts, cuts)
@examples(500)
@example(["aba", "b"], "aba", {2})
def test_cutting_makes_no_difference(stops: list[str], text: str, at: set[int]) -> None:
    whole = match(stops, [text])
    assert match(stops, cut(text, at)) == whole
    assert match(stops, list(text)) == whole


@given(stop_strings, texts, cuts)
@examples(500)
def test_only_what_is_before_the_first_stop_comes_through(stops: list[str], text: str, at: set[int]) -> None:
    """For stop strings that do not contain each other, "first" has one meaning."""
    stops = [stop for stop in stops if not any(other in stop for other in stops if other != stop)]
    first = min((text.index(stop) for stop in stops if stop in text), default=None)
    assert match(stops, cut(text, at)) == (text[:first], first is not None)


@given(stop_strings, texts)
def test_held_back_is_only_a_stop_string_under_way(stops: list[str], text: str) -> None:
    matcher = StopMatcher(stops)
    out = ""
    for end, char in enumerate(text, start=1):
        out += matcher.push(char)
        if matcher.stopped:
            break
        held = text[:end].removeprefix(out)
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)


@pytest.mark.parametrize(
    ("stops", "pieces", "out"),
    [
        (["END"], ["one E", "ND two"], ["one ", "", ""]),
        (["END"], ["one E", "VEN two"], ["one ", "EVEN two", ""]),
        (["END"], ["one EN"], ["one ", "EN"]),
        (["\n\n"], ["a\n", "\n", "b"], ["a", "", "", ""]),
        ([], ["a", "b"], ["a", "b", ""]),
    ],
)
def test_what_comes_out_when(stops: list[str], pieces: list[str], out: list[str]) -> None:
    matcher = StopMatcher(stops)
    assert [*map(matcher.push, pieces), matcher.flush()] == out


def test_after_a_stop_nothing_comes_through() -> None:
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == "a"
    assert (matcher.push("c"), matcher.flush(), matcher.stopped) == ("", "", True)
