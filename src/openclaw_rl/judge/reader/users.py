"""Reads what a user says after a response.

What is a plain question, an answer to the assistant's own question, or contradicts itself, is unclear.
"""

import re
from collections.abc import Sequence

from openclaw_rl.judge.reader.conclusions import Evidence, conclude
from openclaw_rl.judge.reader.hints import make_hint
from openclaw_rl.judge.reader.kinds import Reading, ReplyKind
from openclaw_rl.judge.reader.lexicon import lexicon_for
from openclaw_rl.judge.reader.opposites import Turn, opposes
from openclaw_rl.judge.reader.phrasebook import all_small_words
from openclaw_rl.judge.reader.relevance import Topic, is_about, names
from openclaw_rl.judge.reader.signals import Sentence, read_sentence
from openclaw_rl.judge.reader.similarity import Likeness, begins_alike, compare
from openclaw_rl.judge.reader.text import normalise, own_words, sentences, shorten, without_quotations

_UNCLEAR = Reading(ReplyKind.UNCLEAR)
_FIRST, _LAST = 4, 2
_VERDICTS = ("rejection", "correction", "moving_on", "praise", "thanks")
#: Words that a request in other words has of the first one.
_LEAST_SHARED = 2
#: Words of a message that only says what the response should have heeded.
_MOST_REMINDED = 3
_LONGEST_REMINDER = 80
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_ERROR_OUTPUT = re.compile(
    r"^(?:traceback \(most recent call last\):|(?:fatal |uncaught |unhandled |run-?time |php |[\w.]{1,40}: )?"
    r"[\w.]{0,80}(?:error|exception)(?:\[\w+\]| '?\d+'?(?: \(\w+\))?)?: ?(?=\S|$)|panic: |fatal: )",
    re.I | re.M,
)
_END_OF_ERROR = re.compile(
    r"^(?:fatal |uncaught |unhandled |run-?time |php |[\w.]{1,40}: )?"
    r"[\w.]{0,80}(?:error|exception|panic|fatal)\b[^\n]*$",
    re.I | re.M,
)
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")


def read_user(request: str, response: str, message: str) -> Reading:
    """Read a user's message that came after `response`."""
    likeness = compare(request, message, all_small_words())
    if likeness is Likeness.SAME:
        return Reading(ReplyKind.REPETITION)
    words = own_words(shorten(message)).strip()
    if _ERROR_OUTPUT.search(words):
        return read_error_report(words)
    plain = normalise(without_quotations(words))
    lexicon = lexicon_for(plain)
    said = [read_sentence(part, lexicon) for part in first_and_last(sentences(plain))]
    again = lexicon.find("again", plain) is not None and len(names(request) & names(plain)) >= _LEAST_SHARED
    if repeats(likeness, said, again):
        return Reading(ReplyKind.REPETITION)
    if likeness in (Likeness.EXTENDED, Likeness.NEARLY) and extends(request, message, said):
        return Reading(ReplyKind.CHANGE_REQUEST, make_hint(words))
    turn = Turn(request, response)
    opposed = opposes(plain, turn, lexicon)
    reminded = not any(one.asks or one.has(*_VERDICTS) for one in said) and (
        reminds(plain, turn) or renumbers(words, turn)
    )
    kind = conclude(Evidence(said, asks(response), disputes(words, response), opposed, reminded))
    turns = any(one.has("praise", "contrast") for one in said)
    if not is_about(kind, Topic(plain, lexicon, (request, response), turns)):
        return _UNCLEAR
    if kind in (ReplyKind.CORRECTION, ReplyKind.CHANGE_REQUEST):
        return Reading(kind, make_hint(words))
    return Reading(kind)


def first_and_last(parts: list[str]) -> list[str]:
    """The sentences that are read: what is in the middle of a long message is its matter, not its mood."""
    return parts if len(parts) <= _FIRST + _LAST else parts[:_FIRST] + parts[-_LAST:]


def read_error_report(words: str) -> Reading:
    """Read a message with an error's output in it: what the response led to, and perhaps what is wrong."""
    first = _ERROR_OUTPUT.search(words)
    ends = list(_END_OF_ERROR.finditer(words))
    before = words[: first.start()] if first else words
    after = words[ends[-1].end() :] if ends else ""
    own = f"{before}\n{after}".strip()
    if "?" in own:
        return _UNCLEAR
    return (
        Reading(ReplyKind.CORRECTION, make_hint(own)) if len(_WORD.findall(own)) >= 4 else Reading(ReplyKind.REJECTION)
    )


def repeats(likeness: Likeness, said: Sequence[Sentence], again: bool) -> bool:
    """Whether a message that shares much with the request is the request in other words.

    Only if it says so, or asks for all of it once more.
    """
    if likeness in (Likeness.DIFFERENT, Likeness.SAME) or any(one.has("rejection", "moving_on") for one in said):
        return False
    asked = likeness is Likeness.NEARLY and bool(said) and said[-1].asks
    return asked or (again and not any(one.has("praise") for one in said))


def extends(request: str, message: str, said: Sequence[Sentence]) -> bool:
    """Whether a message is the whole request with something added: what was missing, unless it is only asked about."""
    if any(one.asks or one.has(*_VERDICTS) for one in said):
        return False
    return begins_alike(request, message, all_small_words())


def asks(response: str) -> bool:
    """Whether the response ends with a question, so that what follows may be an answer to it."""
    return response.rstrip().rstrip("\"'”»*_) ").endswith(("?", "？"))


def reminds(message: str, turn: Turn) -> bool:
    """Whether a message of few words names what the request named and the response did not, and nothing else."""
    named = names(message)
    return 0 < len(named) <= _MOST_REMINDED and named <= names(turn.request) and not named & names(turn.response)


def renumbers(words: str, turn: Turn) -> bool:
    """Whether a short message names a number of the response, and beside it one that nobody has named before."""
    named, theirs = set(_NUMBER.findall(words)), set(_NUMBER.findall(shorten(turn.response)))
    asked = set(_NUMBER.findall(shorten(turn.request)))
    return len(words) <= _LONGEST_REMINDER and bool(named & theirs - asked) and bool(named - theirs - asked)


def disputes(words: str, response: str) -> bool:
    """Whether the message names numbers where the response named others."""
    named = set(_NUMBER.findall(words))
    return bool(named) and bool(theirs := set(_NUMBER.findall(shorten(response)))) and not named & theirs
