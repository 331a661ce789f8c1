"""An index of phrases by their first letter.

Python tries the alternatives of a pattern one after the other at every position. With hundreds of them for every signal
and language, that would take most of the reader's time. With the index only a few are tried.
"""

import re
from collections.abc import Iterator, Sequence

_ANY = frozenset({""})
#: A phrase with more possible first letters costs more to compile for each letter than the index saves.
_MANY_LETTERS = 6
_OPTIONAL = re.compile(r"\?|\*|\{0,?\d*\}")


class PhraseIndex:
    """Phrases by their first letter. Each group is compiled at its first use, because most are never used."""

    def __init__(self, phrases: Sequence[str], spaced: bool, few_places: bool = False) -> None:
        """`spaced`: the script has spaces between words, so phrases match whole words and start at a word.

        `few_places`: the phrases are tried at few positions. Those with many first letters are then compiled only once.
        """
        self._spaced = spaced
        self._sources: dict[str, list[str]] = {}
        self._compiled: dict[str, re.Pattern[str]] = {}
        for phrase in phrases:
            letters = first_letters(phrase) if spaced else None
            if letters is None or (few_places and len(letters) > _MANY_LETTERS):
                letters = _ANY
            for letter in letters:
                self._sources.setdefault(letter, []).append(phrase)
        self._any = "" in self._sources

    def match(self, text: str, place: int) -> re.Match[str] | None:
        """Match at one position."""
        letter = text[place : place + 1]
        if letter and letter in self._sources and (match := self._pattern(letter).match(text, place)):
            return match
        return self._pattern("").match(text, place) if self._any else None

    def search(self, text: str, words: Sequence[int]) -> re.Match[str] | None:
        """The first match; `words` are the positions where words begin."""
        first = self._pattern("").search(text) if self._any else None
        sources = self._sources
        for place in words:
            # This is false at most positions, so it is checked first.
            if (letter := text[place]) not in sources:
                continue
            if first and first.start() <= place:
                break
            if match := self._pattern(letter).match(text, place):
                return match
        return first

    def compile(self) -> None:
        """Compile everything now."""
        for letter in self._sources:
            self._pattern(letter)

    def _pattern(self, letter: str) -> re.Pattern[str]:
        """The phrases that begin with a letter; with "", those that may begin with any."""
        try:
            return self._compiled[letter]
        except KeyError:
            return self._compiled.setdefault(letter, join(self._sources[letter], self._spaced))


def join(phrases: Sequence[str], spaced: bool) -> re.Pattern[str]:
    """One pattern for many phrases."""
    joined = "|".join(phrases)
    return re.compile(rf"(?:\b|(?!\w))(?:{joined})(?:\b|(?<!\w))" if spaced else joined)


def split(phrase: str) -> Iterator[str]:
    """The top-level alternatives of a phrase."""
    depth, start = 0, 0
    for place, char in enumerate(phrase):
        depth += (char in "([") - (char in ")]")
        if char == "|" and depth == 0:
            yield phrase[start:place]
            start = place + 1
    yield phrase[start:]


def first_letters(phrase: str) -> frozenset[str] | None:
    """The letters that a match can begin with; None if it can be any."""
    if phrase.startswith(("(?!", "(?=", "(?<")):
        return first_letters(phrase[closing(phrase) + 1 :])
    if phrase.startswith("(?:"):
        end = closing(phrase)
        firsts, rest = [first_letters(part) for part in split(phrase[3:end])], phrase[end + 1 :]
    elif phrase[:1].isalnum():
        firsts, rest = [frozenset(phrase[0])], phrase[1:]
    else:
        return None
    if optional := _OPTIONAL.match(rest):
        firsts.append(first_letters(rest[optional.end() :]))
    known = [letters for letters in firsts if letters is not None]
    return frozenset().union(*known) if len(known) == len(firsts) else None


def closing(phrase: str) -> int:
    """The position of the bracket that closes a phrase's first one."""
    depth = 0
    for place, char in enumerate(phrase):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return place
    raise ValueError(f"This phrase has a bracket that is not closed: {phrase}")
