"""Concludes the kind of a reply from the signals of its sentences.

The order is: negative signals first, because people are polite before they complain; then the next step, if it is named
or follows praise; then praise alone. A claim about what was wrong makes a correction, a verdict alone a rejection, a
wish alone a change request. A wish before a claim is unclear. So is a single weak signal among many unknown words.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.judge.reader.kinds import ReplyKind
from openclaw_rl.judge.reader.phrasebook import all_small_words
from openclaw_rl.judge.reader.signals import Sentence
from openclaw_rl.judge.reader.similarity import content, weight

_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|\w+")
#: Unknown words beside a rejection. With more of them, the rejection may be about something else.
_MOST_BESIDE_REJECTION = 4
#: Unknown words beside praise, by how often the message praises or thanks.
_MOST_BESIDE_PRAISE = (0, 2, 5)
#: Sentences of a message that only gives a better fact.
_MOST_STATEMENTS = 2
#: The same for repeated praise without any word that sounds like trouble.
_MOST_BESIDE_UNTROUBLED = 9
#: The same for a message that confirms a success: "I ran it twice, both times without an error".
_MOST_BESIDE_CONFIRMED = 6
#: Words beside a mere exclamation, or in a clause of their own, that may turn praise into mockery.
_LEAST_MOCKING = 2


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about a message."""

    said: Sequence[Sentence]
    asked: bool = False
    """The response ended with a question, so the message may be an answer to it."""
    disputed: bool = False
    """The message names numbers where the response named others."""
    opposed: bool = False
    """The message says "X, not Y" where the response said Y."""
    reminded: bool = False
    """The message only names what the request named and the response did not, or another fact than the response."""
    restored: bool = False
    """The message names a number of the request where the response has another."""

    def has(self, *signals: str) -> bool:
        """Whether any sentence has any of the signals."""
        return any(sentence.has(*signals) for sentence in self.said)

    def first(self, signal: str) -> tuple[int, int] | None:
        """The sentence that has a signal first, and the position in it."""
        return min(((n, s.found[signal]) for n, s in enumerate(self.said) if s.has(signal)), default=None)


def conclude(evidence: Evidence) -> ReplyKind:
    """What kind of reply the evidence makes."""
    negative = conclude_negative(evidence)
    content = evidence.has("praise") or (evidence.has("thanks") and not evidence.has("closing"))
    move = evidence.first("moving_on")
    if negative in (ReplyKind.CHANGE_REQUEST, ReplyKind.CORRECTION) and move and not evidence.has("rejection", "harm"):
        signal = "change" if negative is ReplyKind.CHANGE_REQUEST else "correction"
        if is_before(move, evidence.first(signal)):
            negative = None if content else ReplyKind.UNCLEAR
        elif content:
            negative = ReplyKind.UNCLEAR
    if negative is not None:
        answers = evidence.asked and not evidence.has("harm")
        return ReplyKind.UNCLEAR if answers else weigh(negative, evidence)
    if evidence.has("sarcasm", "doubt"):
        return ReplyKind.UNCLEAR
    # A user who announces the next step is done with this one, unless the message is an answer.
    if move and (content or not (evidence.asked or evidence.has("trouble"))):
        return ReplyKind.MOVING_ON
    if content:
        return conclude_content(evidence)
    ignored = (evidence.reminded and not evidence.has("tale")) or evidence.restored
    corrects = (ignored and not evidence.has("next", "defer")) or is_better_fact(evidence)
    return ReplyKind.CORRECTION if corrects and not evidence.asked else ReplyKind.UNCLEAR


def is_before(move: tuple[int, int], change: tuple[int, int] | None) -> bool:
    """Whether the next step is announced before what looks like a change, and not in the same breath ("now add")."""
    return change is not None and (move[0] < change[0] or (move[0] == change[0] and move[1] <= change[1]))


def conclude_negative(evidence: Evidence) -> ReplyKind | None:
    """The kind that the negative signals make, or None without any."""
    rejection, change = evidence.first("rejection"), evidence.first("change")
    if not rejection and evidence.has("harm") and evidence.has("praise", "thanks", "sarcasm", "doubt"):
        return ReplyKind.CORRECTION if claims(evidence) else ReplyKind.REJECTION
    # A claim in a question ("is that not ...?") only counts if nothing else is said.
    correction = claims(evidence)
    if rejection and not change and not beside(evidence.said):
        return ReplyKind.REJECTION
    if correction:
        first = not change or bool(rejection) or correction <= change or evidence.has("reminder")
        otherwise = ReplyKind.CHANGE_REQUEST if evidence.has("wish") else ReplyKind.UNCLEAR
        return ReplyKind.CORRECTION if first else otherwise
    if change:
        return conclude_change(evidence, bool(rejection))
    if not rejection:
        return ReplyKind.CORRECTION if evidence.opposed else None
    if evidence.opposed or gives_detail(evidence.said):
        return ReplyKind.CORRECTION
    return ReplyKind.REJECTION if beside(evidence.said) <= _MOST_BESIDE_REJECTION else ReplyKind.UNCLEAR


def claims(evidence: Evidence) -> tuple[int, int] | None:
    """Where the message first claims that something was wrong. A claim in a question counts only if it stands alone."""
    stated = [(n, s.found["correction"]) for n, s in enumerate(evidence.said) if s.has("correction") and not s.asks]
    asked = evidence.first("correction") if len(evidence.said) == 1 and not evidence.has("rejection") else None
    return min(stated, default=asked)


def conclude_change(evidence: Evidence, rejected: bool) -> ReplyKind:
    """The kind of a wish, given what else was said."""
    if evidence.opposed or rejected or evidence.has("reminder"):
        return ReplyKind.CORRECTION
    # "One zero too many. 300,000." may correct a fact, or wish for another one.
    disputed = evidence.disputed and any(s.has("statement") and not s.has("change") for s in evidence.said)
    # "Much more human. Thanks!" is praise: thanks for a change request come before it.
    content = max((n for n, s in enumerate(evidence.said) if s.has("praise", "thanks")), default=-1)
    change = evidence.first("change")
    content_after = change is not None and content > change[0]
    return ReplyKind.UNCLEAR if disputed or content_after or evidence.has("defer") else ReplyKind.CHANGE_REQUEST


def beside(said: Sequence[Sentence]) -> float:
    """How many words the message has beside the verdict."""
    return sum(words_of(sentence.rest) for sentence in said)


def words_of(text: str) -> float:
    """How many words a text has, without small words."""
    return weight(content(_WORD.findall(text), all_small_words()))


def gives_detail(said: Sequence[Sentence]) -> bool:
    """Whether a rejection comes with details: some words, one of them a number or a quotation."""
    rest = " ".join(sentence.rest for sentence in said if not sentence.asks)
    return len(_WORD.findall(rest)) >= 4 and ('"' in rest or _NUMBER.search(rest) is not None)


def weigh(negative: ReplyKind, evidence: Evidence) -> ReplyKind:
    """A negative reading, unless praise without a "but" contradicts it. An exclamation before it does not."""
    turned = evidence.has("contrast", "sarcasm", "harm") or (
        evidence.has("reminder", "rejection") and exclaims(evidence.said)
    )
    if evidence.has("praise") and not turned and negative is not ReplyKind.CHANGE_REQUEST:
        return ReplyKind.UNCLEAR
    return negative


def exclaims(said: Sequence[Sentence]) -> bool:
    """Whether the only praise of a message is its first word or two."""
    return said[0].has("exclamation") and not any(sentence.has("praise") for sentence in said[1:])


def conclude_content(evidence: Evidence) -> ReplyKind:
    """The kind of praise or thanks without anything negative: an acknowledgement, or the next step after it."""
    others = [sentence for sentence in evidence.said if not sentence.has("praise", "thanks")]
    if any(sentence.has("next") for sentence in others):
        return ReplyKind.MOVING_ON
    if evidence.has("contrast"):
        return ReplyKind.UNCLEAR
    if any(sentence.asks for sentence in evidence.said):
        return ReplyKind.MOVING_ON if asks_further(evidence) else ReplyKind.UNCLEAR
    times = sum(sentence.has("praise") + sentence.has("thanks") for sentence in evidence.said)
    most = _MOST_BESIDE_PRAISE[min(times, len(_MOST_BESIDE_PRAISE) - 1)]
    # With a request or much else after the thanks, the message is about that.
    if times > 1 and evidence.has("praise") and not evidence.has("trouble"):
        most = max(most, _MOST_BESIDE_UNTROUBLED)
    confirmed = evidence.has("confirmed") and not evidence.has("trouble")
    if confirmed:
        most = max(most, _MOST_BESIDE_CONFIRMED)
    # "Genius. February 30th.": what a sentence without any signal means is unknown.
    # "Great, I overslept", "Toll, das ist Spanisch": an exclamation before a statement may be mockery.
    # "Great, that's exactly what I needed" states nothing beside its praise.
    if is_exclamation(evidence.said) and beside(evidence.said) >= least_mocking(evidence):
        return ReplyKind.UNCLEAR
    # "Thanks, very helpful, my hamster could have told me": a whole clause without praise may take it back.
    content_at = next(n for n, one in enumerate(evidence.said) if one.has("praise", "thanks"))
    apart = [clause for one in evidence.said[content_at:] for clause in one.apart]
    if not confirmed and any(words_of(clause) >= _LEAST_MOCKING for clause in apart):
        return ReplyKind.UNCLEAR
    once = times == 1 and not confirmed
    unread = once and any(not sentence.found and beside([sentence]) for sentence in evidence.said[1:])
    if unread or evidence.has("next", "defer") or beside(evidence.said) > most:
        return ReplyKind.UNCLEAR
    answers = evidence.asked and not evidence.has("praise")
    return ReplyKind.UNCLEAR if answers else ReplyKind.ACKNOWLEDGEMENT


def least_mocking(evidence: Evidence) -> float:
    """How many words beside an exclamation may turn it into mockery. Thanks and a confirmed success are sincere."""
    if evidence.has("statement", "tale"):
        return 0.5
    return math.inf if evidence.has("thanks", "confirmed") else _LEAST_MOCKING


def asks_further(evidence: Evidence) -> bool:
    """Whether thanks or praise come before a plain question in the same sentence: "thanks, and how long?".

    "Right, and how long?" may ask the same again.
    """
    if evidence.has("trouble", "defer"):
        return False
    contented = [one.has("thanks") or (one.has("praise") and not one.has("exclamation")) for one in evidence.said]
    return all(
        pleased and one.has("question") for pleased, one in zip(contented, evidence.said, strict=True) if one.asks
    )


def is_exclamation(said: Sequence[Sentence]) -> bool:
    """Whether the message praises with nothing but exclamations."""
    praising = [sentence for sentence in said if sentence.has("praise")]
    return bool(praising) and all(sentence.has("exclamation") for sentence in praising)


def is_better_fact(evidence: Evidence) -> bool:
    """Whether the message is a statement or two with another number than the response's."""
    said = evidence.said
    if not evidence.disputed or evidence.has("next", "defer", "moving_on", "tale"):
        return False
    return len(said) <= _MOST_STATEMENTS and all(one.has("statement") and not one.asks for one in said)
