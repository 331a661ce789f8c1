"""Finds what a message sets against what the response said: "tabs, not spaces", "nicht Montag, sondern Dienstag"."""

import re
from typing import NamedTuple

from openclaw_rl.judge.reader.lexicon import Lexicon
from openclaw_rl.judge.reader.relevance import names

_END = re.compile(r"[,.;:!?\n]")
_BEFORE = re.compile(r"[.;:\n]")
_REACH = 60
_MOST = 3
#: A longer message that says "X, not Y" may be about something else.
_SHORT_STATEMENT = 50
#: A request that ends with one of these asks for a fact, so the message may give a better one.
_QUESTION_MARKS = ("?", "\uff1f")


class TurnTexts(NamedTuple):
    """The request and the response before a message."""

    request: str
    response: str


def opposes(message: str, turn: TurnTexts, lexicon: Lexicon) -> bool:
    """Whether a normalised message says "X, not Y" where Y is the response's and X the request's, or a better fact."""
    place = 0
    for _ in range(_MOST):
        if not (match := lexicon.find("opposite", message[place:])):
            return False
        if is_opposition(message, place + match.start(), place + match.end(), turn):
            return True
        place += max(match.end(), match.start() + 1)
    return False


def is_opposition(message: str, start: int, end: int, turn: TurnTexts) -> bool:
    """Whether the words around a "not" are a right and a wrong fact."""
    after = message[end : end + _REACH].lstrip()
    denied = _END.split(after, maxsplit=1)[0]
    wrong = names(denied) & names(turn.response)
    if not wrong:
        return False
    before = _BEFORE.split(message[max(0, start - _REACH) : start].rstrip(" ,!"))[-1]
    right = (names(before) | names(after[len(denied) :])) - wrong
    if right & names(turn.request):
        return True
    states_a_fact = is_question(turn.request) or len(message) <= _SHORT_STATEMENT
    return states_a_fact and bool(right - names(turn.response))


def is_question(request: str) -> bool:
    """Whether a request asks for a fact."""
    return request.rstrip().endswith(_QUESTION_MARKS)
