"""Turns a wish about form into a plain instruction.

A teacher reads a hint beside the request. It follows "Answer in one short sentence only." far more often than "shorter
pls", above all if it is a small model. The `[[instructions]]` of each phrase file have: `when` (phrases), `say` (the
instruction), `to_short` and `to_structured` (instructions for an answer that is already short, or has lists or code),
`again` (the instruction if the first one did not help), `complaint` (the phrases say what was wrong, not what is
wished), and `about` (only the first match per matter counts).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from openclaw_rl.judge.reader.lexicon import clause_starts, first_at, word_starts
from openclaw_rl.judge.reader.phrasebook import SCRIPTS, SPACED, SignalPhrases, compile_phrases, expand, tables
from openclaw_rl.judge.reader.text import normalise

#: A hint with a number is more precise than any instruction.
_NUMBER = re.compile(
    r"\d|\b(?:two|three|four|five|ten|twenty|thirty|fifty|hundred|zehn|zwanzig|vingt|dix|diez|veinte)\b"
)
_WORD = re.compile(r"\w+")
#: An answer with at most this many words is short: two or three sentences.
SHORT_WORDS = 60
#: Structure that one paragraph of text would lose, in an answer or in a hint.
_STRUCTURE = re.compile(r"```|^\s*(?:[-*+•]|\d+[.)])\s|\b(?:list|bullets?|table|code)\b", re.MULTILINE | re.IGNORECASE)


class FormInstruction(NamedTuple):
    """An instruction about form."""

    text: str
    stronger: str = ""
    """The instruction for somebody who wishes the same again, if it is another one."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """An instruction, and the phrases that it replaces."""

    about: str
    when: SignalPhrases
    say: str
    to_short: str | None
    """The instruction if the answer is already short."""
    to_structured: str | None
    """The instruction if there are lists or code."""
    again: str | None
    """The instruction if it is wished again."""
    complaint: bool
    """Whether `when` says what was wrong. A "not" before it then changes nothing."""

    def of(self, answer: "AnswerForm") -> FormInstruction:
        if answer.short and self.to_short:
            return FormInstruction(self.to_short)
        if answer.structured and self.to_structured:
            return FormInstruction(self.to_structured, self.say)
        return FormInstruction(self.say, self.again or self.to_short or "")


class AnswerForm(NamedTuple):
    """The form of the answer that a hint is about."""

    short: bool
    structured: bool


@dataclass(frozen=True, slots=True)
class Instructions:
    """The instructions of one language."""

    script: re.Pattern[str]
    denial: re.Pattern[str] | None
    """Words that negate a wish after them."""
    small_words: frozenset[str]
    words_of_asking: frozenset[str]
    """Words that only introduce a wish."""
    listed: tuple[Instruction, ...]

    def read(self, text: str, answer: AnswerForm) -> "FormWishes":
        """The wishes in a normalised text: at most one instruction per matter."""
        instructions: dict[str, FormInstruction] = {}
        rest = text
        for one in self.listed:
            match = find(one.when, text)
            if not match or (not one.complaint and self.denies(text[: match.start()])):
                continue
            instructions.setdefault(one.about, one.of(answer))
            rest = rest.replace(match.group(), " ")
        words = set(_WORD.findall(text)) & self.small_words
        more = set(_WORD.findall(rest)) - self.small_words - self.words_of_asking
        return FormWishes(instructions, len(words), bool(more))

    def denies(self, before: str) -> bool:
        return bool(self.denial and self.denial.search(before))


class FormWishes(NamedTuple):
    """The wishes about form that one language finds in a text."""

    instructions: Mapping[str, FormInstruction]
    """By matter."""
    familiar: int
    """How many words of the text are small words of the language."""
    more: bool
    """Whether the text says anything else."""

    @property
    def say(self) -> str:
        # Two matters may have the same instruction.
        return " ".join(dict.fromkeys(one.text for one in self.instructions.values()))


def instruct(hint: str, response: str = "") -> str:
    """A hint with an instruction for its wishes about form. If it says nothing else, the instruction replaces it.

    The instruction depends on the `response`: one that is already short must become shorter, and one with lists keeps
    them.
    """
    wishes = form_wishes(hint, response)
    if not wishes:
        return hint
    stop = "." if hint[-1:].isalnum() else ""
    return f"{hint}{stop} {wishes.say}" if wishes.more else wishes.say


def form_wishes(hint: str, response: str = "") -> FormWishes | None:
    """The wishes about form in a hint; None if there are none, or if it has a number, which says it better."""
    text = normalise(hint)
    short = bool(response) and len(_WORD.findall(response)) <= SHORT_WORDS
    answer = AnswerForm(short, bool(_STRUCTURE.search(response) or _STRUCTURE.search(text)))
    if _NUMBER.search(text):
        return None
    read = (language.read(text, answer) for language in all_instructions() if language.script.search(text))
    return max(
        (wishes for wishes in read if wishes.instructions),
        key=lambda wishes: (len(wishes.instructions), wishes.familiar),
        default=None,
    )


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
            one.get("again"),
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
