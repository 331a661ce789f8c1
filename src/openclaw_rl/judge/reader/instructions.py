"""Says a wish about form as a plain instruction.

A hint is for a teacher that reads it beside the request. "AnswerForm in one short sentence only." is followed far more
often than "shorter pls", most of all by small models. What each language says is in the `[[instructions]]` of its
phrase file: `when` (phrases), `say`, `to_short` and `to_structured` (said instead of an answer that is short already,
or has lists or code), `complaint` (the phrases say what was wrong, not what is wished), and `about`, of which the first
that fits counts.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from openclaw_rl.judge.reader.lexicon import clause_starts, first_at, word_starts
from openclaw_rl.judge.reader.phrasebook import SCRIPTS, SPACED, SignalPhrases, compile_phrases, expand, tables
from openclaw_rl.judge.reader.text import normalise

#: Who names a number has said it better than any instruction.
_NUMBER = re.compile(
    r"\d|\b(?:two|three|four|five|ten|twenty|thirty|fifty|hundred|zehn|zwanzig|vingt|dix|diez|veinte)\b"
)
_WORD = re.compile(r"\w+")
#: An answer of so many words has two or three sentences.
SHORT_WORDS = 60
#: In an answer, or in what somebody says: form that one paragraph of text would take away.
_STRUCTURE = re.compile(r"```|^\s*(?:[-*+•]|\d+[.)])\s|\b(?:list|bullets?|table|code)\b", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Instruction:
    """What to say when somebody has said something like it."""

    about: str
    when: SignalPhrases
    say: str
    to_short: str | None
    """What to say instead, of an answer that is short already."""
    to_structured: str | None
    """What to say instead, where there are lists or code."""
    complaint: bool
    """Whether `when` says what was wrong: a "not" before it changes nothing then."""

    def of(self, answer: "AnswerForm") -> str:
        return (answer.short and self.to_short) or (answer.structured and self.to_structured) or self.say


class AnswerForm(NamedTuple):
    """What is known of the answer that somebody speaks of."""

    short: bool
    structured: bool


@dataclass(frozen=True, slots=True)
class Instructions:
    """Those of one language."""

    script: re.Pattern[str]
    denial: re.Pattern[str] | None
    """What stands before a wish that is none."""
    small_words: frozenset[str]
    words_of_asking: frozenset[str]
    """With which a wish is made, and nothing else is said."""
    listed: tuple[Instruction, ...]

    def read(self, text: str, answer: AnswerForm) -> "Wish":
        """What a normalised text wishes: at most one instruction about each matter."""
        found: dict[str, str] = {}
        rest = text
        for one in self.listed:
            match = find(one.when, text)
            if not match or (not one.complaint and self.denies(text[: match.start()])):
                continue
            found.setdefault(one.about, one.of(answer))
            rest = rest.replace(match.group(), " ")
        words = set(_WORD.findall(text)) & self.small_words
        more = set(_WORD.findall(rest)) - self.small_words - self.words_of_asking
        # Two matters may have one instruction.
        return Wish(" ".join(dict.fromkeys(found.values())), len(found), len(words), bool(more))

    def denies(self, before: str) -> bool:
        return bool(self.denial and self.denial.search(before))


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

    Whoever finds a `response` of two sentences too long has to be given one; bold words are no reason to lose a list.
    """
    text = normalise(hint)
    short = bool(response) and len(_WORD.findall(response)) <= SHORT_WORDS
    answer = AnswerForm(short, bool(_STRUCTURE.search(response) or _STRUCTURE.search(text)))
    if _NUMBER.search(text):
        return hint
    wishes = [wish for own in all_instructions() if own.script.search(text) and (wish := own.read(text, answer)).say]
    if not wishes:
        return hint
    best = max(wishes, key=lambda wish: (wish.matters, wish.familiar))
    stop = "." if hint[-1:].isalnum() else ""
    return f"{hint}{stop} {best.say}" if best.more else best.say


def find(phrases: SignalPhrases, text: str) -> re.Match[str] | None:
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
            one.get("to_short"),
            one.get("to_structured"),
            one.get("complaint", False),
        )
        for one in table["instructions"]
    )
    denial = re.compile(rf"\b{table['denial']}") if "denial" in table else None
    return Instructions(
        SCRIPTS[table["script"]], denial, word_list(table, "small_words"), word_list(table, "words_of_asking"), listed
    )


def word_list(table: dict[str, Any], name: str) -> frozenset[str]:
    return frozenset(_WORD.findall(normalise(" ".join(table.get(name, [])))))
