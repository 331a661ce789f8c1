"""Concludes from what a user says after a response how the response was taken.

Negative signals outweigh thanks, for people are polite before they complain. What is a plain question, an answer to the
assistant's own question, or contradicts itself, is unclear.
"""

import re
from collections.abc import Sequence

from openclaw_rl.judge.reader.hints import make_hint
from openclaw_rl.judge.reader.kinds import Reading, ReplyKind
from openclaw_rl.judge.reader.lexicon import lexicon_for
from openclaw_rl.judge.reader.phrasebook import all_small_words
from openclaw_rl.judge.reader.relevance import Topic, is_about
from openclaw_rl.judge.reader.signals import Sentence, read_sentence
from openclaw_rl.judge.reader.similarity import Likeness, compare, content
from openclaw_rl.judge.reader.text import normalise, own_words, sentences, shorten, without_quotations

_UNCLEAR = Reading(ReplyKind.UNCLEAR)
_FIRST, _LAST = 4, 2
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_ERROR_OUTPUT = re.compile(r"^(?:traceback \(most recent call last\):|[\w.]*(?:error|exception): )", re.I | re.M)
_END_OF_ERROR = re.compile(r"^[\w.]*(?:error|exception)\b[^\n]*$", re.I | re.M)
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
    if repeats(likeness, said, lexicon.find("again", plain) is not None):
        return Reading(ReplyKind.REPETITION)
    if extends(likeness, said):
        return Reading(ReplyKind.CHANGE_REQUEST, make_hint(words))
    kind = conclude(said, asked=asks(response), disputed=disputes(words, response))
    if not is_about(kind, Topic(plain, lexicon, (request, response))):
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
    """Whether a message that shares much with the request is the request in other words: only if it says so."""
    return (
        likeness is Likeness.VARIED
        and again
        and not any(one.has("rejection", "correction", "moving_on") for one in said)
    )


def extends(likeness: Likeness, said: Sequence[Sentence]) -> bool:
    """Whether a message is the whole request with something added: what was missing, unless it is only asked about."""
    verdicts = ("rejection", "correction", "moving_on", "praise", "thanks")
    return likeness is Likeness.EXTENDED and not any(one.asks or one.has(*verdicts) for one in said)


def conclude(said: Sequence[Sentence], asked: bool, disputed: bool) -> ReplyKind:
    """What kind of reply the sentences make together."""
    negative = conclude_negative(said)
    content = [n for n, sentence in enumerate(said) if sentence.has("praise", "thanks")]
    moves = [(n, s.found["moving_on"]) for n, s in enumerate(said) if s.has("moving_on")]
    if negative is ReplyKind.CHANGE_REQUEST and moves:
        changes = min((n, s.found["change"]) for n, s in enumerate(said) if s.has("change"))
        negative = None if content and is_before(min(moves), changes) else ReplyKind.UNCLEAR
    if negative is not None:
        return ReplyKind.UNCLEAR if asked else weigh(negative, said)
    if any(sentence.has("sarcasm") for sentence in said):
        return ReplyKind.UNCLEAR
    if moves and not (asked and not content):
        return ReplyKind.MOVING_ON
    if content:
        return conclude_content(said)
    if disputed and not asked and len(said) == 1 and said[0].has("statement") and not said[0].asks:
        return ReplyKind.CORRECTION
    return ReplyKind.UNCLEAR


def is_before(move: tuple[int, int], change: tuple[int, int]) -> bool:
    """Whether the next step is announced before what looks like a change, and not in the same breath ("now add")."""
    return move[0] < change[0] or (move[0] == change[0] and move[1] <= change[1])


def conclude_negative(said: Sequence[Sentence]) -> ReplyKind | None:
    """The kind that the negative signals make, or None without any."""
    places = {
        signal: min((n, s.found[signal]) for n, s in enumerate(said) if s.has(signal))
        for signal in ("rejection", "correction", "change")
        if any(sentence.has(signal) for sentence in said)
    }
    if not places:
        return None
    if "rejection" in places and "change" not in places and not has_content(said):
        return ReplyKind.REJECTION
    if "correction" in places and ("change" not in places or places["correction"] <= places["change"]):
        return ReplyKind.CORRECTION
    if "change" in places:
        return ReplyKind.CORRECTION if "rejection" in places else ReplyKind.CHANGE_REQUEST
    return ReplyKind.CORRECTION if gives_detail(said) else ReplyKind.REJECTION


def has_content(said: Sequence[Sentence]) -> bool:
    """Whether anything is said beside the rejection itself."""
    return any(content(_WORD.findall(sentence.rest), all_small_words()) for sentence in said)


def gives_detail(said: Sequence[Sentence]) -> bool:
    """Whether a rejection comes with something definite: some words of which one is a number or a quotation."""
    rest = " ".join(sentence.rest for sentence in said if not sentence.asks)
    return len(_WORD.findall(rest)) >= 4 and ('"' in rest or _NUMBER.search(rest) is not None)


def weigh(negative: ReplyKind, said: Sequence[Sentence]) -> ReplyKind:
    """A negative reading, unless praise without a "but" speaks against it."""
    praised = any(sentence.has("praise") for sentence in said)
    turned = any(sentence.has("contrast", "sarcasm") for sentence in said)
    if praised and not turned and negative is not ReplyKind.CHANGE_REQUEST:
        return ReplyKind.UNCLEAR
    return negative


def conclude_content(said: Sequence[Sentence]) -> ReplyKind:
    """What follows from praise or thanks with nothing negative: an acknowledgement, or the next step after it."""
    others = [sentence for sentence in said if not sentence.has("praise", "thanks")]
    if any(sentence.has("next") for sentence in others):
        return ReplyKind.MOVING_ON
    if any(sentence.asks for sentence in said) or any(sentence.has("contrast") for sentence in said):
        return ReplyKind.UNCLEAR
    return ReplyKind.ACKNOWLEDGEMENT


def asks(response: str) -> bool:
    """Whether the response ends with a question, so that what follows may be an answer to it."""
    return response.rstrip().rstrip("\"'”»*_) ").endswith(("?", "？"))


def disputes(words: str, response: str) -> bool:
    """Whether the message names numbers where the response named others."""
    named = set(_NUMBER.findall(words))
    return bool(named) and bool(theirs := set(_NUMBER.findall(shorten(response)))) and not named & theirs
