"""Compares a message with the request: by words, or by characters in scripts without spaces."""

import re
from collections import Counter
from enum import Enum, auto

from openclaw_rl.judge.reader.text import normalise, shorten

_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\d+|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+")
_CHARACTER = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
_MOST_TOKENS = 60
#: Shorter requests ("yes", "continue") are repeated without a complaint.
_LEAST_LETTERS = 8
_FEW_ADDED, _ENOUGH_KEPT = 2, 4


class Likeness(Enum):
    """How a message relates to the request before it."""

    DIFFERENT = auto()
    SAME = auto()
    """The same again, verbatim or with other small words."""
    NEARLY = auto()
    """All of it again, and a word or two more."""
    EXTENDED = auto()
    """All of it again, and something more."""
    VARIED = auto()
    """Much of it again, with something else in place of a part: the same in other words, or the next of its kind."""


def compare(request: str, reply: str, small_words: frozenset[str]) -> Likeness:
    """Compare a message with the request, ignoring small words."""
    old, new = tokens(request), tokens(reply)
    if not old or not new:
        return Likeness.DIFFERENT
    if old == new:
        return Likeness.SAME if is_weighty(old) else Likeness.DIFFERENT
    old_content, new_content = content(old, small_words), content(new, small_words)
    if not is_weighty(old_content) or not new_content:
        return Likeness.DIFFERENT
    lost, added = differences(old_content, new_content)
    return grade(len(old_content), len(lost), len(added), is_same_text(old, new))


def grade(size: int, lost: int, added: int, alike: bool) -> Likeness:
    """The likeness, from the number of words that were lost and added."""
    if lost == 0 and added == 0:
        return Likeness.SAME
    if lost == 0:
        return Likeness.NEARLY if added <= _FEW_ADDED and size >= _ENOUGH_KEPT else Likeness.EXTENDED
    if added == 0 and lost <= 0.34 * size:
        return Likeness.SAME
    if lost <= 0.5 * size or alike:
        return Likeness.VARIED
    return Likeness.DIFFERENT


def tokens(text: str, most: int = _MOST_TOKENS) -> list[str]:
    """The words of a text; in scripts without spaces, its characters."""
    return _TOKEN.findall(normalise(shorten(text)))[:most]


def content(words: list[str], small_words: frozenset[str]) -> list[str]:
    """The distinct words that are not small words."""
    return [word for word in dict.fromkeys(words) if word not in small_words]


def weight(words: list[str]) -> float:
    """The number of words. A Chinese or Japanese character counts half."""
    return sum(0.5 if _CHARACTER.match(word) else 1.0 for word in words if len(word) > 1 or _CHARACTER.match(word))


def begins_alike(one: str, other: str, small_words: frozenset[str]) -> bool:
    """Whether the first content word of `other` is among the first two of `one`."""
    first, others = content(tokens(one), small_words)[:2], content(tokens(other), small_words)[:1]
    return bool(others) and any(others[0] == word or is_form_of(others[0], word) for word in first)


def is_weighty(words: list[str]) -> bool:
    """Whether the words have enough letters. A Chinese or Japanese character counts as two."""
    return sum(len(word) if word.isascii() else 2 * len(word) for word in words) >= _LEAST_LETTERS


def differences(old: list[str], new: list[str]) -> tuple[list[str], list[str]]:
    """The words of each that the other does not have in any form."""
    olds, news = set(old), set(new)
    lost = [word for word in old if word not in news]
    added = [word for word in new if word not in olds]
    if len(lost) > 0.6 * len(old):
        return lost, added
    really_lost = [word for word in lost if not any(is_form_of(word, other) for other in added)]
    really_added = [word for word in added if not any(is_form_of(word, other) for other in lost)]
    return really_lost, really_added


def is_form_of(one: str, other: str) -> bool:
    """Whether two words differ only in their ending or by a typing error. Numbers must be equal."""
    if one[0] != other[0] or min(len(one), len(other)) < 4 or not (one.isalpha() and other.isalpha()):
        return False
    stem = min(len(one), len(other)) - 1
    if one[: max(4, stem)] == other[: max(4, stem)] and abs(len(one) - len(other)) <= 3:
        return True
    return sorted(one) == sorted(other) or overlap(one, other, 2) >= 0.75


def is_same_text(old: list[str], new: list[str]) -> bool:
    """Whether most character triples of the two texts agree."""
    return overlap("".join(old), "".join(new), 3) >= 0.6


def overlap(one: str, other: str, size: int) -> float:
    """Dice coefficient of the character n-grams of two texts."""
    left = Counter(one[i : i + size] for i in range(len(one) - size + 1))
    right = Counter(other[i : i + size] for i in range(len(other) - size + 1))
    total = left.total() + right.total()
    return 2 * (left & right).total() / total if total else 0.0
