"""An index of phrases by their first letter.

Python tries the alternatives of a pattern one after the other at every position. With hundreds of them for every signal
and language, that would take most of the reader's time. With the index only a few are tried.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Self

#: A phrase with more possible first letters costs more to compile for each letter than the index saves.
_MANY_LETTERS = 6
_REPEATED = ("*", "+", "{")
_OPTIONAL = re.compile(r"\?|\*|\{0,?\d*\}")


class PhraseGroup:
    """Phrases of one signal and language that can begin with one letter. Compiled at its first use."""

    def __init__(self, spaced: bool) -> None:
        self.phrases: list[str] = []
        self._spaced = spaced

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        return join(self.phrases, self._spaced)


class PhraseIndex:
    """Phrases by their first letter. Earlier phrases take precedence, as they do in one pattern."""

    def __init__(self, groups: Mapping[str, Sequence[PhraseGroup]]) -> None:
        """`groups`: by letter, in the order in which they are tried; with "", phrases that may begin with any."""
        self._groups = groups
        self._any = groups.get("", ())

    @classmethod
    def of(cls, phrases: Sequence[str], spaced: bool, few_places: bool = False) -> Self:
        """An index of the phrases of one language.

        `spaced`: the script has spaces between words, so phrases match whole words and start at a word.
        `few_places`: the phrases are tried at few positions. Those with many first letters are then compiled only once.
        """
        groups: dict[str, PhraseGroup] = defaultdict(lambda: PhraseGroup(spaced))
        for phrase in phrases:
            letters = first_letters(phrase) if spaced else None
            if letters is None or (few_places and len(letters) > _MANY_LETTERS):
                groups[""].phrases.append(phrase)
                continue
            for letter in letters:
                groups[letter].phrases.append(narrow(phrase, letter))
        return cls({letter: [group] for letter, group in groups.items()})

    @classmethod
    def merge(cls, indexes: Sequence[Self]) -> Self:
        """An index of all phrases of several languages. It shares their compiled patterns."""
        groups: dict[str, list[PhraseGroup]] = defaultdict(list)
        for index in indexes:
            for letter, listed in index._groups.items():
                groups[letter] += listed
        return cls(dict(groups))

    def match(self, text: str, place: int) -> re.Match[str] | None:
        """Match at one position."""
        letter = text[place : place + 1]
        groups = (*self._groups.get(letter, ()), *self._any) if letter else self._any
        return first_match(groups, text, place)

    def search(self, text: str, words: Sequence[int]) -> re.Match[str] | None:
        """The first match; `words` are the positions where words begin."""
        found = (match for group in self._any if (match := group.pattern.search(text)))
        first = min(found, key=re.Match.start, default=None)
        for place in words:
            # There are none at most positions, so this is checked first.
            if not (groups := self._groups.get(text[place])):
                continue
            if first and first.start() <= place:
                break
            if match := first_match(groups, text, place):
                return match
        return first

    def compile(self) -> None:
        """Compile everything now."""
        for groups in self._groups.values():
            for group in groups:
                _ = group.pattern


def first_match(groups: Iterable[PhraseGroup], text: str, place: int) -> re.Match[str] | None:
    return next((match for group in groups if (match := group.pattern.match(text, place))), None)


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


def narrow(phrase: str, letter: str) -> str:
    """The phrase without the alternatives at its beginning that cannot begin with a letter. One of them can."""
    if phrase.startswith(("(?!", "(?=", "(?<")):
        end = closing(phrase) + 1
        return phrase[:end] + narrow(phrase[end:], letter)
    if not phrase.startswith("(?:"):
        return phrase
    end = closing(phrase)
    rest = phrase[end + 1 :]
    if rest.startswith(_REPEATED):
        # A repetition may begin with another letter than the first time.
        return phrase
    parts = [part for part in split(phrase[3:end]) if letter in (first_letters(part) or ())]
    if not parts:
        return narrow(rest.removeprefix("?"), letter)
    return f"(?:{'|'.join(narrow(part, letter) for part in parts)}){rest}"


def closing(phrase: str) -> int:
    """The position of the bracket that closes a phrase's first one."""
    depth = 0
    for place, char in enumerate(phrase):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return place
    raise ValueError(f"This phrase has a bracket that is not closed: {phrase}")
