"""The index finds what one pattern of all phrases finds."""

import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.judge.rules.phrases import PhraseIndex, join, narrow

PHRASES = [
    "(?:that|it) is(?: not)? bad",
    "(?:no|not|it) (?:that|bad)",
    "(?:(?:is|it) )?(?:bad|so)",
    "(?:is |not )*that",
    "(?!it bad)(?:it|is|so) (?:bad|that)",
    "(?:no |(?:so|that) )?not (?:it|is)",
    "so",
]
WORDS = sorted({"that", "it", "is", "not", "bad", "no", "so", ","})
texts = st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join)


def words(text: str) -> list[int]:
    return [match.start() for match in re.finditer(r"\w+", text)]


def span(match: re.Match[str] | None) -> tuple[int, int] | None:
    return match.span() if match else None


@pytest.mark.parametrize("few_places", [True, False])
@given(text=texts)
def test_the_index_finds_what_one_pattern_finds(text: str, few_places: bool) -> None:
    index, whole = PhraseIndex.of(PHRASES, True, few_places), join(PHRASES, True)
    assert span(index.search(text, words(text))) == span(whole.search(text))
    for place in words(text):
        assert span(index.match(text, place)) == span(whole.match(text, place))


@given(text=texts)
def test_merged_indexes_find_what_an_index_of_all_phrases_finds(text: str) -> None:
    anything = [*PHRASES, r"\w+ bad"]
    merged = PhraseIndex.merge([PhraseIndex.of(anything[:4], True), PhraseIndex.of(anything[4:], True)])
    one = PhraseIndex.of(anything, True)
    assert span(merged.search(text, words(text))) == span(one.search(text, words(text)))
    for place in words(text):
        assert span(merged.match(text, place)) == span(one.match(text, place))


def test_only_the_alternatives_that_begin_with_a_letter_are_kept() -> None:
    assert narrow("(?:that|it) is(?: not)? bad", "i") == "(?:it) is(?: not)? bad"
    assert narrow("(?:(?:is|it) )?(?:bad|so)", "b") == "(?:bad)"
    assert narrow("(?:is |not )*that", "i") == "(?:is |not )*that"


def test_the_first_note_waits_only_for_the_phrases_of_its_language() -> None:
    code = """
import asyncio
from openclaw_rl.app.background import BackgroundLoops
from openclaw_rl.judge.rules.phrases import all_languages, all_scripts
print(asyncio.run(BackgroundLoops(None, None, 1.0).topic_of("Answer in one sentence.")))
print(len(all_languages()), ["signals" in vars(one) for one in (*all_languages(), *all_scripts())].count(True))
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    topic, languages, read = shown.split()
    assert topic == "length"
    assert int(languages) > 6
    assert read == "1"
