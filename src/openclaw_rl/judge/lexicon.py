"""Finds phrases in a text, in the languages that the text may be in."""

import re
from collections.abc import Sequence

from openclaw_rl.judge.phrasebook import CONTRAST, Language, Phrases, all_languages

#: Below this many words, every language of a script is tried.
_TELLING_WORDS = 8
_WORD = re.compile(r"\w+")
_FIRST_WORD = re.compile(r"\W{0,8}")
_CLAUSE_START = re.compile(rf"[,:{CONTRAST}]\s")


class Lexicon:
    """The languages that a text may be in, asked together."""

    def __init__(self, languages: Sequence[Language]) -> None:
        self._languages = languages

    def find(self, signal: str, text: str) -> re.Match[str] | None:
        """The first place where one of a signal's phrases stands."""
        starts = clause_starts(text)
        listed = (language.signals.get(signal) for language in self._languages)
        found = [match for phrases in listed if phrases for match in first_matches(phrases, text, starts)]
        return min(found, key=lambda match: match.start(), default=None)

    def blank(self, signal: str, text: str, by: str = "~") -> str:
        """The text with a mark in place of a signal's phrases."""
        for language in self._languages:
            if phrases := language.signals.get(signal):
                text = blank_phrases(phrases, text, by)
        return text


def lexicon_for(text: str) -> Lexicon:
    """The languages to look at for a normalised text: by its script, and if it is long enough by its small words."""
    written = [language for language in all_languages() if language.script.search(text)]
    words = _WORD.findall(text)
    if len(words) < _TELLING_WORDS:
        return Lexicon(written)
    hits = [sum(word in language.small_words for word in words) if language.spaced else 0 for language in written]
    enough = 0.6 * max(hits, default=0)
    return Lexicon([one for one, n in zip(written, hits, strict=True) if n >= enough or not one.spaced])


def clause_starts(text: str) -> list[int]:
    """Where clauses begin: at the first word, and after commas, colons and contrasts."""
    first = _FIRST_WORD.match(text)
    return [first.end() if first else 0, *(match.end() for match in _CLAUSE_START.finditer(text))]


def first_matches(phrases: Phrases, text: str, starts: Sequence[int]) -> list[re.Match[str]]:
    """The first phrase that stands anywhere, and the first of those that begin a clause."""
    found = phrases.anywhere.search(text) if phrases.anywhere else None
    first = None
    if phrases.at_start:
        first = next((match for start in starts if (match := phrases.at_start.match(text, start))), None)
    return [match for match in (found, first) if match]


def blank_phrases(phrases: Phrases, text: str, by: str) -> str:
    """The text with a mark in place of every phrase."""
    if phrases.anywhere:
        text = phrases.anywhere.sub(f" {by} ", text)
    if phrases.at_start:
        for start in reversed(clause_starts(text)):
            if match := phrases.at_start.match(text, start):
                text = f"{text[:start]} {by} {text[match.end() :]}"
    return text
