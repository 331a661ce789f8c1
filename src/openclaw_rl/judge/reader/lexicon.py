"""Finds phrases in a text, in the languages that the text may be in."""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice

from openclaw_rl.judge.reader.alternatives import PhraseIndex
from openclaw_rl.judge.reader.phrasebook import CONTRAST, Language, all_languages, all_scripts

#: With fewer small words, the language is unknown and every language of the script is tried.
_MIN_SMALL_WORDS = 3
#: A limit, because a text of only commas would take long.
_MOST_CLAUSES = 12
_MOST_BLANKS = 20
_WORD = re.compile(r"\w+")
_FIRST_WORD = re.compile(r"\W{0,8}")
_CLAUSE_START = re.compile(rf"[,:{CONTRAST}]\s")


class Lexicon:
    """Searches the phrases of all languages that a text may be in."""

    def __init__(self, languages: Sequence[Language]) -> None:
        self._languages = languages

    def find(self, signal: str, text: str) -> re.Match[str] | None:
        """The first match of any of a signal's phrases."""
        return self._find(signal, text, clause_starts(text), word_starts(text))

    def _find(self, signal: str, text: str, starts: Sequence[int], words: Sequence[int]) -> re.Match[str] | None:
        first: re.Match[str] | None = None
        for language in self._languages:
            if phrases := language.signals.get(signal):
                first = earlier(first, phrases.anywhere.search(text, words))
                first = earlier(first, first_at(phrases.at_start, text, starts))
        return first

    def blank(self, signal: str, text: str, by: str = "~") -> str:
        """The text with a signal's phrases replaced by a mark."""
        place, pieces = 0, []
        starts, words = clause_starts(text), word_starts(text)
        for _ in range(_MOST_BLANKS):
            if not (match := self._find(signal, text, starts, words)):
                break
            pieces += [text[place : match.start()], f" {by} "]
            place = max(match.end(), match.start() + 1)
            text = "\0" * place + text[place:]
            starts = [start for start in starts if start >= place]
            words = [word for word in words if word >= place]
        return "".join([*pieces, text[place:]])


def lexicon_for(text: str, opening: str = "") -> Lexicon:
    """The languages that a normalised text may be in, by its script and, if it is long enough, its small words.

    `opening` is the beginning of the text, which may be in another language than the rest.
    """
    written = [language for language in all_languages() if language.script.search(text)]
    hits, first = small_words_of(text, written), small_words_of(opening, written)
    most, most_first = max(hits, default=0), max([1, *first])
    if most < _MIN_SMALL_WORDS:
        if has_word_of_one(text, written):
            return Lexicon([one for one, n in zip(written, hits, strict=True) if n or not one.spaced])
        return Lexicon([script for script in all_scripts() if script.script.search(text)])
    counted = zip(written, hits, first, strict=True)
    return Lexicon([one for one, n, m in counted if n >= 0.6 * most or m >= most_first or not one.spaced])


def small_words_of(text: str, languages: Sequence[Language]) -> list[int]:
    """How many words of a text are small words of each language; 0 for scripts without spaces."""
    words = _WORD.findall(text)
    return [sum(word in one.small_words for word in words) if one.spaced else 0 for one in languages]


def has_word_of_one(text: str, languages: Sequence[Language]) -> bool:
    """Whether a text has a small word that only one language has, so languages without small words are excluded."""
    return any(sum(word in one.small_words for one in languages) == 1 for word in _WORD.findall(text))


@lru_cache(maxsize=16)
def clause_starts(text: str) -> Sequence[int]:
    """The positions where clauses begin: the first word, and after commas, colons and contrasts."""
    first = _FIRST_WORD.match(text)
    later = islice(_CLAUSE_START.finditer(text), _MOST_CLAUSES)
    return [first.end() if first else 0, *(match.end() for match in later)]


@lru_cache(maxsize=16)
def word_starts(text: str) -> Sequence[int]:
    """The positions where words begin."""
    return [match.start() for match in _WORD.finditer(text)]


def first_at(phrases: PhraseIndex, text: str, starts: Sequence[int]) -> re.Match[str] | None:
    """The first match at one of the given positions."""
    return next((match for start in starts if (match := phrases.match(text, start))), None)


def earlier(one: re.Match[str] | None, other: re.Match[str] | None) -> re.Match[str] | None:
    """The match that begins first."""
    return other if other and (not one or other.start() < one.start()) else one
