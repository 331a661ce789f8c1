"""Says a wish about form as a plain instruction.

A hint is for a teacher that reads it beside the request. "Answer in one short sentence only." is followed far more
often than "shorter pls", most of all by small models. What each language says is in the `[[instructions]]` of its
phrase file: `when` (phrases), `say`, `to_short` (said of an answer that is short already), and `about`, of which the
first that fits counts.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from openclaw_rl.judge.reader.lexicon import clause_starts, first_at, word_starts
from openclaw_rl.judge.reader.phrasebook import SCRIPTS, SPACED, Phrases, compile_phrases, expand, tables
from openclaw_rl.judge.reader.text import normalise

#: Who names a number has said it better than any instruction.
_NUMBER = re.compile(
    r"\d|\b(?:two|three|four|five|ten|twenty|thirty|fifty|hundred|zehn|zwanzig|vingt|dix|diez|veinte)\b"
)
_WORD = re.compile(r"\w+")
#: An answer of so many words has two or three sentences.
SHORT_WORDS = 60


@dataclass(frozen=True, slots=True)
class Instruction:
    """What to say when somebody has said something like it."""

    about: str
    when: Phrases
    say: str
    to_short: str
    """What to say instead, of an answer that is short already."""


@dataclass(frozen=True, slots=True)
class Instructions:
    """Those of one language."""

    script: re.Pattern[str]
    small_words: frozenset[str]
    words_of_asking: frozenset[str]
    """With which a wish is made, and nothing else is said."""
    listed: tuple[Instruction, ...]

    def read(self, text: str, short: bool) -> "Wish":
        """What a normalised text wishes of a short or long answer: at most one instruction about each matter."""
        found: dict[str, str] = {}
        rest = text
        for one in self.listed:
            match = find(one.when, text)
            if match and one.about not in found:
                found[one.about] = one.to_short if short else one.say
            if match:
                rest = rest.replace(match.group(), " ")
        words = set(_WORD.findall(text)) & self.small_words
        more = set(_WORD.findall(rest)) - self.small_words - self.words_of_asking
        return Wish(" ".join(found.values()), len(found), len(words), bool(more))


class Wish(NamedTuple):
    """What one language makes of a text."""

    say: str
    matters: int
    familiar: int
    """Words of the text that are small words of the language."""
    more: bool
    """Whether the text says something besides."""


def instruct(hint: str, response: str = "") -> str:
    """A hint with its wishes about form as instructions, in place of it if it says nothing else.

    Whoever finds a `response` of two sentences too long has to be given one.
    """
    text = normalise(hint)
    short = bool(response) and len(_WORD.findall(response)) <= SHORT_WORDS
    if _NUMBER.search(text):
        return hint
    wishes = [wish for own in all_instructions() if own.script.search(text) and (wish := own.read(text, short)).say]
    if not wishes:
        return hint
    best = max(wishes, key=lambda wish: (wish.matters, wish.familiar))
    return f"{hint} {best.say}" if best.more else best.say


def find(phrases: Phrases, text: str) -> re.Match[str] | None:
    return phrases.anywhere.search(text, word_starts(text)) or first_at(phrases.at_start, text, clause_starts(text))


@cache
def all_instructions() -> tuple[Instructions, ...]:
    return tuple(read_instructions(table) for table in tables() if "instructions" in table)


def read_instructions(table: dict[str, Any]) -> Instructions:
    words, spaced = table.get("words", {}), table["script"] in SPACED
    listed = tuple(
        Instruction(
            one["about"],
            compile_phrases([expand(phrase, words) for phrase in one["when"]], spaced),
            one["say"],
            one.get("to_short", one["say"]),
        )
        for one in table["instructions"]
    )
    return Instructions(
        SCRIPTS[table["script"]], word_list(table, "small_words"), word_list(table, "words_of_asking"), listed
    )


def word_list(table: dict[str, Any], name: str) -> frozenset[str]:
    return frozenset(_WORD.findall(normalise(" ".join(table.get(name, [])))))
