"""Compares a message with the request and the response before it.

It may ask the same again, ask the same of something else, or state a fact that contradicts the response.
"""

import re
from collections import Counter
from enum import Enum, auto
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from openclaw_rl.judge.rules.phrases import (
    Lexicon,
    all_small_words,
    ends_with_question,
    lexicon_for,
    normalise,
    shorten,
)

_TOKEN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\d+|[^\W\d_\u3040-\u30ff\u3400-\u9fff]+")
_HAN = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")
#: Content words that a rephrased request shares with the first one. A new one may share fewer by chance.
LEAST_SHARED = 2
_MOST_TOKENS = 60
_MOST_CONTENT_TOKENS = 200
#: Shorter requests ("yes", "continue") are repeated without a complaint.
_LEAST_LETTERS = 8
_FEW_ADDED, _ENOUGH_KEPT = 2, 4
#: Names that `tokens` would cut into pieces, or that differ only in a small word: "a.py", "src/b", "第一".
_NAME = re.compile(r"\w+(?:[./_-]\w+)+|第\w")
#: Content words in a message that only repeats what the response ignored.
_MOST_REMINDED = 3
#: A longer message says more than one fact.
_LONGEST_REMINDER = 80
_LONGEST_FACT = 60
#: Words in a message with a better fact that neither the request nor the response has.
_MOST_UNKNOWN = 1
_CAPITALS = re.compile(r"\b[^\W\d_]{3,}\b")
_CAPITALISED = re.compile(r"\b[A-ZÀ-Þ][a-zß-ÿ]{2,}\b")
_CLAUSE_END = re.compile(r"[,.;:!?\n]")
_STATEMENT_END = re.compile(r"[.;:\n]")
#: Characters around a "not" that are read, and how many of them are tried.
_REACH = 60
_MOST_OPPOSITES = 3
#: A longer message that says "X, not Y" may be about something else.
_SHORT_STATEMENT = 50
_DIGITS = re.compile(r"\d+(?:[.,:]\d+)*")
_LETTERS = re.compile(r"[^\W\d_]+")
#: Number words from 2 to 12 in English, German, French and Spanish. "One" is also an article or a pronoun.
_NUMBER_WORDS = {
    word: str(number)
    for number, listed in enumerate(
        (
            "two zwei deux dos",
            "three drei trois tres",
            "four vier quatre cuatro",
            "five funf cinq cinco",
            "six sechs seis",
            "seven sieben sept siete",
            "eight acht huit ocho",
            "nine neun neuf nueve",
            "ten zehn dix diez",
            "eleven elf onze once",
            "twelve zwolf douze doce",
        ),
        start=2,
    )
    for word in listed.split()
}
_HAN_COUNT = re.compile(r"[两二三四五六七八九十]+(?=[个個位人张張本条條次天年月日点點份句段页頁号號岁歲只间間道])")
_HAN_NUMBERS = {"两": "2"} | {sign: str(number) for number, sign in enumerate("二三四五六七八九十", start=2)}


class TurnTexts(NamedTuple):
    """The request and the response before a message."""

    request: str
    response: str


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


def compare(request: str, reply: str) -> Likeness:
    """Compare a message with the request, ignoring small words."""
    old, new = tokens(request), tokens(reply)
    if not old or not new:
        return Likeness.DIFFERENT
    if old == new:
        return Likeness.SAME if is_weighty(old) else Likeness.DIFFERENT
    old_content, new_content = without_small_words(old), without_small_words(new)
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


def without_small_words(words: list[str]) -> list[str]:
    """The distinct words that are not small words."""
    small_words = all_small_words()
    return [word for word in dict.fromkeys(words) if word not in small_words]


def content_words(text: str) -> frozenset[str]:
    """The words of a text that name something; in scripts without spaces, pairs of characters."""
    return content_of_short(shorten(text))


@lru_cache(maxsize=16)
def content_of_short(text: str) -> frozenset[str]:
    """The same for a shortened text. It is cached, because reading one message needs it several times."""
    words = tokens(text, _MOST_CONTENT_TOKENS)
    small = all_small_words()
    pairs = {
        one + other
        for one, other in pairwise(words)
        if _WIDE.match(one) and _WIDE.match(other) and not (one in small and other in small)
    }
    return frozenset(word for word in without_small_words(words) if len(word) >= 3 or word.isdigit()) | pairs


def count_content(words: list[str]) -> float:
    """The number of distinct words without small words. A Chinese or Japanese character counts half."""
    content = without_small_words(words)
    return sum(0.5 if _HAN.match(word) else 1.0 for word in content if len(word) > 1 or _HAN.match(word))


def count_letters(text: str) -> int:
    """The number of letters. A Chinese, Japanese or Korean character counts as three."""
    return len(text) + 2 * len(_WIDE.findall(text))


def begins_like(request: str, message: str) -> bool:
    """Whether the first content word of a message is among the first two of the request."""
    first = without_small_words(tokens(message))[:1]
    return bool(first) and any(is_form_of(first[0], word) for word in without_small_words(tokens(request))[:2])


def is_weighty(words: list[str]) -> bool:
    """Whether the words have enough letters. A Chinese or Japanese character counts as two."""
    return sum(len(word) if word.isascii() else 2 * len(word) for word in words) >= _LEAST_LETTERS


def differences(old: list[str], new: list[str]) -> tuple[list[str], list[str]]:
    """The words of each that the other does not have in any form."""
    lost = [word for word in old if word not in new]
    added = [word for word in new if word not in old]
    if len(lost) > 0.6 * len(old):
        return lost, added
    really_lost = [word for word in lost if not any(is_form_of(word, other) for other in added)]
    really_added = [word for word in added if not any(is_form_of(word, other) for other in lost)]
    return really_lost, really_added


def is_form_of(one: str, other: str) -> bool:
    """Whether two words are equal, or differ only in their ending or by a typing error. Numbers must be equal."""
    if one == other:
        return True
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


def asks_same_of_another(request: str, message: str, normalised: str, lexicon: Lexicon) -> bool:
    """Whether a message asks for the same with another object: "create the file b.py" after "create the file a.py".

    `normalised` is the message as it is searched for phrases. "Make it darker" and "write a shorter poem" refer to the
    response; so does a message that only adds to the request.
    """
    old, new = tokens(request), tokens(message)
    old_content, new_content = without_small_words(old), without_small_words(new)
    if not old_content or not new_content or ends_with_question(request):
        return False
    # A word that the request has too does not refer to the response: "make slide 4 simpler".
    new_words = " ".join(word for word in normalised.split() if word not in old)
    if lexicon.has("refers", new_words) or lexicon.has("opposite", normalised):
        return False
    if not (old[0] == new[0] or is_form_of(old_content[0], new_content[0])):
        return False
    lost, added = differences(old_content, new_content)
    old_names, new_names = set(_NAME.findall(request)), set(_NAME.findall(message))
    return bool(lost or old_names - new_names) and bool(added or new_names - old_names)


def gives_missing_fact(words: str, normalised: str, turn: TurnTexts) -> bool:
    """Whether a message only gives a fact that the response should have had.

    `normalised` is the message without quotations.
    """
    if len(words) > _LONGEST_REMINDER:
        return False
    return (
        names_what_is_missing(normalised, turn)
        or corrects_number(words, turn)
        or restores_number(words, turn)
        or repeats_with_emphasis(words, turn)
        or answers_otherwise(words, turn)
    )


def names_what_is_missing(normalised: str, turn: TurnTexts) -> bool:
    """Whether a message only names things that the request named and the response did not."""
    named = content_words(normalised)
    asked = content_words(turn.request)
    return 0 < len(named) <= _MOST_REMINDED and named <= asked and not named & content_words(turn.response)


def corrects_number(words: str, turn: TurnTexts) -> bool:
    """Whether a message names a number of the response and a new one."""
    given, answered, asked = numbers(words), numbers(shorten(turn.response)), numbers(shorten(turn.request))
    return bool(given & answered - asked) and bool(given - answered - asked)


def restores_number(words: str, turn: TurnTexts) -> bool:
    """Whether a message names a number of the request where the response has another: "six", not "a table for four"."""
    given, answered, asked = numbers(words), numbers(shorten(turn.response)), numbers(shorten(turn.request))
    unknown = content_words(words) - content_words(turn.request) - content_words(turn.response)
    return bool(given & asked - answered) and bool(answered - asked) and len(unknown) <= _MOST_UNKNOWN


def disputes_number(words: str, response: str) -> bool:
    """Whether a message names numbers where the response named others."""
    given = numbers(words)
    answered = numbers(shorten(response)) if given else set()
    return bool(answered) and not given & answered


def repeats_with_emphasis(words: str, turn: TurnTexts) -> bool:
    """Whether a message repeats a part of the request with emphasis: in capitals, or with an exclamation mark."""
    asked = content_words(turn.request)
    shouted = {word for word in _CAPITALS.findall(words) if word.isupper() and word not in turn.request}
    if {normalise(word) for word in shouted} & asked:
        return True
    named = content_words(words)
    return words.rstrip().endswith(("!", "！")) and bool(named) and named <= asked


def answers_otherwise(words: str, turn: TurnTexts) -> bool:
    """Whether a message answers the request's question with another number or name than the response."""
    if not ends_with_question(turn.request) or len(words) > _LONGEST_FACT:
        return False
    known = content_words(turn.request) | content_words(turn.response)
    unknown = {word for word in content_words(words) - known if not word.isdigit()}
    given, answered = numbers(words), numbers(shorten(turn.response))
    if given - numbers(shorten(turn.request)) and answered:
        new_number = not given & answered and len(unknown) <= _MOST_UNKNOWN
        return new_number and request_has("number_asked", turn.request)
    shares_words = bool(content_words(words) & known)
    return request_has("name_asked", turn.request) and gives_name(words, unknown, shares_words)


def request_has(signal: str, request: str) -> bool:
    """Whether a request has a signal."""
    normalised = normalise(shorten(request))
    return lexicon_for(normalised).has(signal, normalised)


def gives_name(words: str, unknown: set[str], shares_words: bool) -> bool:
    """Whether a message states one name with no words but those of the turn: "It was Goethe", "Goethe wrote it"."""
    normalised = normalise(words)
    lexicon = lexicon_for(normalised)
    named = {normalise(name) for name in _CAPITALISED.findall(words)}
    if unknown and unknown <= named:
        return shares_words or lexicon.has("statement", normalised)
    # Some users write everything in lower case.
    return words.islower() and len(unknown) == 1 and lexicon.has("names_it", normalised)


def opposes(message: str, turn: TurnTexts, lexicon: Lexicon) -> bool:
    """Whether a normalised message sets a right fact against one of the response: "tabs, not spaces"."""
    place = 0
    for _ in range(_MOST_OPPOSITES):
        if not (match := lexicon.find("opposite", message[place:])):
            return False
        if is_opposition(message, place + match.start(), place + match.end(), turn):
            return True
        place += max(match.end(), match.start() + 1)
    return False


def is_opposition(message: str, start: int, end: int, turn: TurnTexts) -> bool:
    """Whether the words around a "not" are a fact of the request, or a new one, and one of the response."""
    after = message[end : end + _REACH].lstrip()
    denied = _CLAUSE_END.split(after, maxsplit=1)[0]
    wrong = content_words(denied) & content_words(turn.response)
    if not wrong:
        return False
    before = _STATEMENT_END.split(message[max(0, start - _REACH) : start].rstrip(" ,!"))[-1]
    right = (content_words(before) | content_words(after[len(denied) :])) - wrong
    if right & content_words(turn.request):
        return True
    states_a_fact = ends_with_question(turn.request) or len(message) <= _SHORT_STATEMENT
    return states_a_fact and bool(right - content_words(turn.response))


def is_new_topic(text: str, lexicon: Lexicon, turn: TurnTexts) -> bool:
    """Whether a normalised text names things, and none that the turn before named."""
    if len(content_words(text)) < LEAST_SHARED or lexicon.has("points_back", text):
        return False
    return not shares_words(text, turn)


def shares_words(text: str, turn: TurnTexts, least: int = 1) -> bool:
    """Whether a text names something that the request or the response named."""
    named = content_words(text)
    return any(len(named & content_words(before)) >= least for before in turn)


def numbers(text: str) -> set[str]:
    """The numbers of a text, in digits or in words, as digits."""
    words = {_NUMBER_WORDS[word] for word in _LETTERS.findall(normalise(text)) if word in _NUMBER_WORDS}
    counts = {_HAN_NUMBERS[count] for count in _HAN_COUNT.findall(text) if count in _HAN_NUMBERS}
    return set(_DIGITS.findall(text)) | words | counts
