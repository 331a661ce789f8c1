"""Reasoning and content come apart the same way however the response was cut."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from openclaw_rl.rendering.response import ReasoningSplitter

OPEN, CLOSE = "<think>", "</think>"

# Built from the parts that matter, so that tags, near-tags and whitespace meet in every order.
responses = st.lists(
    st.sampled_from([OPEN, CLOSE, " ", "\n\n", "<", "</", "<thin", "</think", "a", "é", "think>", "\u3000"]),
    max_size=10,
).map("".join)


def split(pieces: Sequence[str], starts_inside: bool = False) -> tuple[str, str]:
    """(reasoning, content) of a response that comes in these pieces."""
    splitter = ReasoningSplitter(starts_inside=starts_inside)
    labelled = [out for piece in pieces for out in splitter.push(piece)] + splitter.flush()
    assert all(text for _, text in labelled)
    channels = [channel for channel, _ in labelled]
    assert channels == sorted(channels, reverse=True), "reasoning after content"
    reasoning = "".join(text for channel, text in labelled if channel == "reasoning")
    return reasoning, "".join(text for channel, text in labelled if channel == "content")


def expected(response: str, starts_inside: bool) -> tuple[str, str]:
    """The rule itself, with the whole response in hand."""
    if not starts_inside:
        if not response.lstrip().startswith(OPEN):
            return "", response
        response = response.lstrip().removeprefix(OPEN)
    thought, closed, rest = response.partition(CLOSE)
    return (thought.strip(), rest.lstrip()) if closed else (thought.lstrip(), "")


def cut(text: str, at: set[int]) -> list[str]:
    edges = [0, *sorted(position for position in at if position < len(text)), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(responses, st.booleans(), st.sets(st.integers(0, 60)))
@example("<think>a \n</think> \nb", False, {9})
@example(" \n<think>\na</think>\n\nb <think> c", False, {1, 4, 12, 20})
def test_any_cutting_gives_what_the_rule_says(response: str, starts_inside: bool, at: set[int]) -> None:
    assert split(cut(response, at), starts_inside) == expected(response, starts_inside)
    assert split(response, starts_inside) == expected(response, starts_inside)


@pytest.mark.parametrize(
    ("response", "reasoning", "content"),
    [
        ("<think>\nwhy\n</think>\n\nbecause", "why", "because"),
        ("\n <think>a  b</think>c \n", "a  b", "c \n"),
        ("<think>\n\n</think>\n\nplain", "", "plain"),
        ("<think>never closed </thin", "never closed </thin", ""),
        ("  plain\n", "", "  plain\n"),
        ("see <think>x</think>", "", "see <think>x</think>"),
        ("<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        (" <thin", "", " <thin"),
        ("a</think>b", "", "a</think>b"),
    ],
)
def test_where_the_block_counts(response: str, reasoning: str, content: str) -> None:
    assert split([response]) == (reasoning, content)


def test_a_block_the_prompt_has_opened() -> None:
    assert split(["\nwhy\n</think>\nbecause"], starts_inside=True) == ("why", "because")
    assert split(["why "], starts_inside=True) == ("why ", "")


@given(st.text(alphabet="ab </think>", max_size=200).filter(lambda text: CLOSE not in text))
def test_only_whitespace_and_a_tag_under_way_are_held_back(thought: str) -> None:
    splitter = ReasoningSplitter(starts_inside=True)
    out = "".join(text for char in thought for _, text in splitter.push(char))
    held = thought.lstrip().removeprefix(out).lstrip()
    assert CLOSE.startswith(held)


def test_content_is_never_held_back() -> None:
    splitter = ReasoningSplitter()
    assert splitter.push("a") == [("content", "a")]
    assert splitter.push(" \n<think") == [("content", " \n<think")]
