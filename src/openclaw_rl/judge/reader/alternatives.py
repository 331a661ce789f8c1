"""Many alternatives of a regular expression, tried only where their first letter stands.

Python tries the alternatives of a pattern one after the other at every place. With some hundred of them for every
signal and language that is most of the reader's time; a table by first letter leaves a few.
"""

import re
from collections.abc import Iterator, Sequence

_ANY = frozenset({""})
#: With more first letters, a phrase costs more to compile for each than it saves where it is tried.
_MANY_LETTERS = 6
_OPTIONAL = re.compile(r"\?|\*|\{0,?\d*\}")


class PhraseIndex:
    """Phrases by the letter they begin with, compiled when they are first needed: most never are."""

    def __init__(self, phrases: Sequence[str], spaced: bool, few_places: bool = False) -> None:
        """Phrases are of whole words where words have spaces between them; elsewhere no place is known to begin one.

        Where they are tried at few places only, what can begin with many letters is compiled once, not for each.
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
        """Match at one place."""
        letter = text[place : place + 1]
        if letter and letter in self._sources and (match := self._pattern(letter).match(text, place)):
            return match
        return self._pattern("").match(text, place) if self._any else None

    def search(self, text: str, words: Sequence[int]) -> re.Match[str] | None:
        """The first match; `words` are the places where words begin."""
        found = self._pattern("").search(text) if self._any else None
        sources = self._sources
        for place in words:
            # Asked for most places in vain: the shortest way out comes first.
            if (letter := text[place]) not in sources:
                continue
            if found and found.start() <= place:
                break
            if match := self._pattern(letter).match(text, place):
                return match
        return found

    def compile(self) -> None:
        """Compile everything now."""
        for letter in self._sources:
            self._pattern(letter)

    def _pattern(self, letter: str) -> re.Pattern[str]:
        """What begins with a letter that some phrase begins with; with "", what may begin with anything."""
        try:
            return self._compiled[letter]
        except KeyError:
            return self._compiled.setdefault(letter, join(self._sources[letter], self._spaced))


def join(phrases: Sequence[str], spaced: bool) -> re.Pattern[str]:
    """One pattern for many phrases."""
    joined = "|".join(phrases)
    return re.compile(rf"(?:\b|(?!\w))(?:{joined})(?:\b|(?<!\w))" if spaced else joined)


def split(phrase: str) -> Iterator[str]:
    """The alternatives of a phrase that are not inside of brackets."""
    depth, start = 0, 0
    for place, char in enumerate(phrase):
        depth += (char in "([") - (char in ")]")
        if char == "|" and depth == 0:
            yield phrase[start:place]
            start = place + 1
    yield phrase[start:]


def first_letters(phrase: str) -> frozenset[str] | None:
    """The letters that a match can begin with, or None if it can be anything."""
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
    """Where the bracket that a phrase begins with is closed."""
    depth = 0
    for place, char in enumerate(phrase):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return place
    raise ValueError(f"This phrase has a bracket that is not closed: {phrase}")
