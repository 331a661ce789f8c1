"""Reads what a user says after a response, and concludes what kind of reply it is.

The order is: negative signals first, because people are polite before they complain; then the next step, if it is named
or follows praise; then praise alone. A claim about what was wrong makes a correction, a verdict alone a rejection, a
wish alone a change request. A plain question, an answer to the assistant's own question, a contradictory message, a
wish before a claim, and a single weak signal among many unknown words are unclear.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from openclaw_rl.judge.rules.comparison import (
    LEAST_SHARED,
    Likeness,
    TurnTexts,
    asks_same_of_another,
    begins_like,
    compare,
    content_words,
    count_content,
    count_letters,
    disputes_number,
    gives_missing_fact,
    is_new_topic,
    opposes,
    restores_number,
    shares_words,
)
from openclaw_rl.judge.rules.instructions import make_hint, says_nothing
from openclaw_rl.judge.rules.phrases import (
    WORD,
    Lexicon,
    ends_with_question,
    shorten,
    without_code,
)
from openclaw_rl.judge.rules.signals import (
    ERROR_OUTPUT,
    Message,
    Sentence,
    before_material,
    count_losses_as_harm,
    count_wishes_as_changes,
    ends_with_offer,
    is_for_a_judge,
    reaction,
    read_message,
    without_refusal,
    without_request,
)


class ReplyKind(StrEnum):
    """The kinds of next states."""

    ACKNOWLEDGEMENT = "acknowledgement"
    """The user says that the response is good: +1."""
    CORRECTION = "correction"
    """The user says what was wrong or what is right: -1, and these words are the hint."""
    REJECTION = "rejection"
    """The user says that the response is wrong or useless, but not what is right: -1, no hint."""
    REPETITION = "repetition"
    """The user asks the same again, in the same or other words: -1, no hint."""
    CHANGE_REQUEST = "change_request"
    """The user wants a change (shorter, another form, an addition): -1, and these words are the hint."""
    MOVING_ON = "moving_on"
    """The user announces the next step: +1."""
    TOOL_SUCCESS = "tool_success"
    TOOL_ERROR = "tool_error"
    """The call could not do its work: -1. Failures from outside (network, rate limits, the user) are UNCLEAR."""
    UNCLEAR = "unclear"
    """The rules abstain."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading a next state."""

    kind: ReplyKind
    hint: str = ""
    """What the user wanted, in the user's own words, cleaned."""


_UNCLEAR = Reading(ReplyKind.UNCLEAR)
NEGATIVE = frozenset({ReplyKind.CORRECTION, ReplyKind.REJECTION, ReplyKind.CHANGE_REQUEST})
_VERDICTS = ("rejection", "correction", "moving_on", "praise", "thanks")
_VERDICTS_BUT_NEXT = ("rejection", "correction", "reminder", "praise", "thanks", "contrast")
_COMPLAINTS = ("rejection", "reminder", "contrast", "sarcasm", "doubt", "harm", "loss")
_TELLING = ("change", "wish", "correction", "rejection", "contrast", "reminder", "statement")
#: Words beside the repeated request that may be a wish. "I asked: ..." has fewer.
_LEAST_ADDED = 3
#: Words around error output that may say what is wrong.
_LEAST_EXPLAINED = 4
_END_OF_ERROR = re.compile(
    r"^(?:fatal |uncaught |unhandled |run-?time |php |[\w.]{1,40}: )?"
    r"[\w.]{0,80}(?:error|exception|panic|fatal)\b[^\n]*$",
    re.I | re.M,
)
_NUMBER = re.compile(r"\d+(?:[.,:]\d+)*")
#: A request with few letters ("in a table", "add types") refers to what was said before; one with many does not.
_FEW_LETTERS, _MANY_LETTERS = 32, 60
#: "Fix this one: ...": the message brings its own material.
_MATERIAL = re.compile(
    r"\b(?:this(?: one)?|these|following|folgende\w*|diese\w*|suivant\w*|cette|ce|siguiente\w*|est[ea])\b"
    r"[^.!?\n]{0,40}: ?\""
    r"|(?:\b(?:translate|proofread|correct|rewrite|rephrase|ubersetze?|korrigiere|traduis|corrige|traduce)\b|翻译|把|将)"
    r"[^.!?,\n]{0,20}(?:\"\"|: ?\S)"
)
#: Unknown words beside a rejection. With more of them, the rejection may be about something else.
_MOST_BESIDE_REJECTION = 4
#: Unknown words beside praise, by how often the message praises or thanks.
_MOST_BESIDE_PRAISE = (0, 2, 5)
#: The same for repeated praise without any word that sounds like trouble.
_MOST_BESIDE_UNTROUBLED = 9
#: The same for a message that confirms a success: "I ran it twice, both times without an error".
_MOST_BESIDE_CONFIRMED = 6
#: Sentences of a message that only gives a better fact.
_MOST_STATEMENTS = 2
#: Words beside a mere exclamation, or in a clause of their own, that may turn praise into mockery.
_LEAST_MOCKING = 2


def read_user(request: str, response: str, text: str) -> Reading:
    """Read a user's message that came after `response`."""
    likeness = compare(request, text)
    if likeness is Likeness.SAME:
        return Reading(ReplyKind.REPETITION)
    if is_for_a_judge(text):
        return _UNCLEAR
    turn = TurnTexts(request, response)
    words = without_code(shorten(text)).strip()
    if ends_with_question(response):
        words = without_refusal(words)
    reports_error = ERROR_OUTPUT.search(words) is not None
    if (before := before_material(words, reports_error)) is not None:
        return read_before_material(before, turn)
    if reports_error:
        return read_error_report(words)
    if reading := read_beside_request(words, turn):
        return reading
    message = read_message(words)
    count_wishes_as_changes(message, likeness is not Likeness.DIFFERENT)
    if not message.has(*_VERDICTS_BUT_NEXT) and asks_same_of_another(
        request, text, message.normalised, message.lexicon
    ):
        return _UNCLEAR
    if repeats_request(likeness, message, request):
        return Reading(ReplyKind.REPETITION)
    if extends_request(likeness, message, request, text):
        return Reading(ReplyKind.CHANGE_REQUEST, make_hint(words))
    if goes_further(message.sentences) and not ends_with_question(response):
        return Reading(ReplyKind.MOVING_ON)
    return read_reaction(message, turn) or read_whole(message, turn)


def read_before_material(words: str, turn: TurnTexts) -> Reading:
    """Read what a user says before the material that a message brings. Praise before it moves on."""
    reading = read_whole(read_message(words), turn)
    return Reading(ReplyKind.MOVING_ON) if reading.kind is ReplyKind.ACKNOWLEDGEMENT else reading


def read_error_report(words: str) -> Reading:
    """Read a message that contains error output: the response led to it, and the message may say what is wrong."""
    first = ERROR_OUTPUT.search(words)
    ends = list(_END_OF_ERROR.finditer(words))
    before = words[: first.start()] if first else words
    after = words[ends[-1].end() :] if ends else ""
    words_around = f"{before}\n{after}".strip()
    if "?" in words_around:
        return _UNCLEAR
    if len(WORD.findall(words_around)) < _LEAST_EXPLAINED:
        return Reading(ReplyKind.REJECTION)
    return Reading(ReplyKind.CORRECTION, make_hint(words_around))


def read_beside_request(words: str, turn: TurnTexts) -> Reading | None:
    """Read the rest of a message that repeats the whole request, if that is a wish or a correction."""
    added = without_request(words, turn.request)
    if len(WORD.findall(added)) < _LEAST_ADDED:
        return None
    message = read_message(added)
    count_wishes_as_changes(message, same_topic=True)
    reading = read_whole(message, turn)
    return reading if reading.hint else None


def repeats_request(likeness: Likeness, message: Message, request: str) -> bool:
    """Whether a message that resembles the request repeats it: it says so, or asks for all of it again."""
    if likeness is Likeness.DIFFERENT or message.has("rejection", "moving_on"):
        return False
    if likeness is Likeness.NEARLY and message.sentences and message.sentences[-1].asks:
        return True
    says_again = message.lexicon.has("asked_again", message.normalised) and not message.has("praise")
    return says_again and len(content_words(request) & content_words(message.normalised)) >= LEAST_SHARED


def extends_request(likeness: Likeness, message: Message, request: str, text: str) -> bool:
    """Whether a message is the whole request with an addition that is not a question."""
    if likeness not in (Likeness.EXTENDED, Likeness.NEARLY) or message.has(*_VERDICTS):
        return False
    return not any(sentence.asks for sentence in message.sentences) and begins_like(request, text)


def goes_further(sentences: Sequence[Sentence]) -> bool:
    """Whether a message begins with praise or thanks and then asks for another thing, without any complaint."""
    if not sentences or not sentences[0].has("praise", "thanks") or any(complains(one) for one in sentences):
        return False
    first = sentences[0]
    content = min(first.found.get(signal, len(first.normalised)) for signal in ("praise", "thanks"))
    return first.found.get("another_thing", -1) > content or any(one.has("another_thing") for one in sentences[1:])


def complains(sentence: Sentence) -> bool:
    """Whether a sentence complains. "I should have another one" is no correction."""
    asked = sentence.found.get("another_thing", len(sentence.normalised)) <= sentence.found.get("correction", -1)
    return sentence.has(*_COMPLAINTS) or (sentence.has("correction") and not asked)


def read_reaction(message: Message, turn: TurnTexts) -> Reading | None:
    """Read the part of a message that reacts, if it is clear and another part asks for something new.

    Without an announcement, the new part may belong to the reaction. Then these are clear: wishes about form, praise,
    thanks if the rest is a question or about something else, and a reading that the whole message gives too.
    """
    sentences = reaction(message)
    if len(sentences) == len(message.sentences):
        return None
    part = message._replace(normalised="\n".join(one.normalised for one in sentences), sentences=sentences)
    reading = read_whole(part, turn)
    new = message.sentences[len(sentences)]
    announced = new.has("announcement")
    if reading.hint and (announced or part.has("wish") or read_whole(message, turn).hint):
        return reading
    doubtful = message.has("contrast", "trouble") or begins_with_but(new, message.lexicon)
    if reading.kind is ReplyKind.ACKNOWLEDGEMENT and not doubtful:
        rest = message.normalised[len(part.normalised) :]
        moves_on = announced or part.has("praise") or new.has("question") or is_new_topic(rest, message.lexicon, turn)
        return Reading(ReplyKind.MOVING_ON) if moves_on else None
    return reading if announced and reading.kind is ReplyKind.REJECTION else None


def begins_with_but(sentence: Sentence, lexicon: Lexicon) -> bool:
    contrast = lexicon.find("contrast", sentence.normalised)
    return contrast is not None and contrast.start() == 0


def read_whole(message: Message, turn: TurnTexts) -> Reading:
    """Read a message, or a part of one, as a whole."""
    count_losses_as_harm(message.sentences, turn.request)
    kind = conclude(Evidence.of(message, turn))
    mocks = message.has("harm") and message.has("praise", "thanks", "sarcasm")
    if not mocks and not is_about_response(kind, message, turn):
        return _UNCLEAR
    if kind not in (ReplyKind.CORRECTION, ReplyKind.CHANGE_REQUEST):
        return Reading(kind)
    # What the message says apart from praise and thanks before and after it.
    telling = [one for one in message.sentences if not one.has("praise", "thanks") or one.has(*_TELLING)]
    telling = telling or list(message.sentences)
    hint = make_hint(message.words[telling[0].start : telling[-1].end])
    return Reading(ReplyKind.REJECTION) if says_nothing(hint, message.lexicon) else Reading(kind, hint)


def is_about_response(kind: ReplyKind, message: Message, turn: TurnTexts) -> bool:
    """Whether a message is about the response, or asks for something new in words that sound like a complaint."""
    # It wants another form, or rejects what was not asked for.
    if message.has("wish") or (message.has("rejection") and message.has("reminder")):
        return True
    text = message.normalised
    reacts = message.has("praise", "contrast")
    if kind not in NEGATIVE:
        return True
    if _MATERIAL.search(text) and not reacts:
        return False
    elsewhere = message.lexicon.has("users_thing", text) or message.lexicon.has("new_thing", text)
    if kind is ReplyKind.CHANGE_REQUEST:
        return reacts or (not elsewhere and points_back(message, _FEW_LETTERS)) or shares_words(text, turn)
    if elsewhere:
        return shares_words(text, turn, LEAST_SHARED)
    return points_back(message, _MANY_LETTERS) or shares_words(text, turn)


def points_back(message: Message, most_letters: int) -> bool:
    """Whether a message is short, or refers to the response."""
    return count_letters(message.normalised) <= most_letters or message.lexicon.has("points_back", message.normalised)


# What the signals of a message mean together.


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known about a message."""

    message: Message
    answers: bool
    """The response ended with a question, so the message may be an answer to it."""
    offered: bool
    """That question only offered more help, or asked whether the response was of use."""
    disputed: bool
    """The message names numbers where the response named others."""
    opposed: bool
    """The message says "X, not Y" where the response said Y."""
    reminded: bool
    """The message only names what the request named and the response did not, or another fact than the response."""
    restored: bool
    """The message names a number of the request where the response has another."""

    @classmethod
    def of(cls, message: Message, turn: TurnTexts) -> "Evidence":
        sentences = message.sentences
        words = message.words[sentences[0].start : sentences[-1].end] if sentences else ""
        states = not any(one.asks or one.has(*_VERDICTS) for one in sentences)
        return cls(
            message,
            answers=ends_with_question(turn.response),
            offered=ends_with_offer(turn.response),
            disputed=disputes_number(message.words, turn.response),
            opposed=opposes(message.normalised, turn, message.lexicon),
            reminded=states and gives_missing_fact(words, message.normalised, turn),
            restored=states and restores_number(words, turn),
        )

    def has(self, *signals: str) -> bool:
        """Whether any sentence has any of the signals."""
        return self.message.has(*signals)


def conclude(evidence: Evidence) -> ReplyKind:
    """What kind of reply the evidence makes."""
    negative = conclude_negative(evidence)
    content = evidence.has("praise") or (evidence.has("thanks") and not evidence.has("closing"))
    move = evidence.message.first("moving_on")
    if negative in (ReplyKind.CHANGE_REQUEST, ReplyKind.CORRECTION) and move and not evidence.has("rejection", "harm"):
        changed = evidence.message.first("change" if negative is ReplyKind.CHANGE_REQUEST else "correction")
        # The next step is announced before what looks like a change, and not in the same breath ("now add").
        if changed is not None and move <= changed:
            negative = None if content else ReplyKind.UNCLEAR
        elif content:
            negative = ReplyKind.UNCLEAR
    if negative is not None:
        return ReplyKind.UNCLEAR if may_answer(evidence, negative) else weigh(negative, evidence)
    if evidence.has("sarcasm", "doubt"):
        return ReplyKind.UNCLEAR
    # A user who announces the next step is done with this one, unless the message is an answer.
    if move and (content or not (evidence.answers or evidence.has("trouble"))):
        return ReplyKind.MOVING_ON
    if content:
        return conclude_content(evidence)
    ignored = (evidence.reminded and not evidence.has("tale")) or evidence.restored
    corrects = (ignored and not evidence.has("next", "defer")) or is_better_fact(evidence)
    return ReplyKind.CORRECTION if corrects and not evidence.answers else ReplyKind.UNCLEAR


def may_answer(evidence: Evidence, negative: ReplyKind) -> bool:
    """Whether what sounds negative may answer the response's question, which was no mere offer of more help."""
    if not evidence.answers or evidence.offered or evidence.has("harm"):
        return False
    # A complaint and nothing else is no answer.
    return negative is ReplyKind.CHANGE_REQUEST or count_other_words(evidence.message.sentences) > 0


def conclude_negative(evidence: Evidence) -> ReplyKind | None:
    """The kind that the negative signals make, or None without any."""
    rejection, change = evidence.message.first("rejection"), evidence.message.first("change")
    claim = first_claim(evidence.message)
    if not rejection and evidence.has("harm") and evidence.has("praise", "thanks", "sarcasm", "doubt"):
        return ReplyKind.CORRECTION if claim else ReplyKind.REJECTION
    other_words = count_other_words(evidence.message.sentences)
    if rejection and not change and not other_words:
        return ReplyKind.REJECTION
    if claim:
        if not change or rejection or claim <= change or evidence.has("reminder"):
            return ReplyKind.CORRECTION
        return ReplyKind.CHANGE_REQUEST if evidence.has("wish") else ReplyKind.UNCLEAR
    if change:
        return conclude_change(evidence, change, rejected=bool(rejection))
    if not rejection:
        return ReplyKind.CORRECTION if evidence.opposed else None
    if evidence.opposed or gives_detail(evidence.message.sentences):
        return ReplyKind.CORRECTION
    return ReplyKind.REJECTION if other_words <= _MOST_BESIDE_REJECTION else ReplyKind.UNCLEAR


def first_claim(message: Message) -> tuple[int, int] | None:
    """Where the message first claims that something was wrong. A claim in a question counts only if it stands alone."""
    corrections = ((n, one) for n, one in enumerate(message.sentences) if one.has("correction"))
    stated = [(n, one.found["correction"]) for n, one in corrections if not one.asks]
    alone = len(message.sentences) == 1 and not message.has("rejection")
    return min(stated, default=message.first("correction") if alone else None)


def conclude_change(evidence: Evidence, change: tuple[int, int], rejected: bool) -> ReplyKind:
    """The kind of a wish, given what else was said."""
    if evidence.opposed or rejected or evidence.has("reminder"):
        return ReplyKind.CORRECTION
    sentences = evidence.message.sentences
    # "One zero too many. 300,000." may correct a fact, or wish for another one.
    disputed = evidence.disputed and any(one.has("statement") and not one.has("change") for one in sentences)
    # "Much more human. Thanks!" is praise: thanks for a change request come before it.
    content_after = any(one.has("praise", "thanks") for one in sentences[change[0] + 1 :])
    return ReplyKind.UNCLEAR if disputed or content_after or evidence.has("defer") else ReplyKind.CHANGE_REQUEST


def count_other_words(sentences: Sequence[Sentence]) -> float:
    """How many words the sentences have beside the verdict, without small words."""
    return sum(count_words(sentence.rest) for sentence in sentences)


def count_words(text: str) -> float:
    """How many words a text has, without small words."""
    return count_content(WORD.findall(text))


def gives_detail(sentences: Sequence[Sentence]) -> bool:
    """Whether a rejection comes with details: some words, one of them a number or a quotation."""
    rest = " ".join(sentence.rest for sentence in sentences if not sentence.asks)
    return len(WORD.findall(rest)) >= 4 and ('"' in rest or _NUMBER.search(rest) is not None)


def weigh(negative: ReplyKind, evidence: Evidence) -> ReplyKind:
    """A negative reading, unless praise without a "but" contradicts it. An exclamation before it does not."""
    if not evidence.has("praise") or evidence.has("contrast", "sarcasm", "harm"):
        return negative
    first, *others = evidence.message.sentences
    only_exclaims = first.has("exclamation") and not any(one.has("praise") for one in others)
    taken_back = only_exclaims and evidence.has("reminder", "rejection")
    return negative if taken_back or negative is ReplyKind.CHANGE_REQUEST else ReplyKind.UNCLEAR


def conclude_content(evidence: Evidence) -> ReplyKind:
    """The kind of praise or thanks without anything negative: an acknowledgement, or the next step after it."""
    sentences = evidence.message.sentences
    if any(one.has("next") and not one.has("praise", "thanks") for one in sentences):
        return ReplyKind.MOVING_ON
    if evidence.has("contrast"):
        return ReplyKind.UNCLEAR
    if any(one.asks for one in sentences):
        return ReplyKind.MOVING_ON if asks_after_content(evidence) else ReplyKind.UNCLEAR
    confirmed = evidence.has("confirmed") and not evidence.has("trouble")
    if may_mock(evidence, confirmed) or evidence.has("next", "defer"):
        return ReplyKind.UNCLEAR
    times = sum(one.has("praise") + one.has("thanks") for one in sentences)
    # "Genius. February 30th.": what a sentence without any signal means is unknown.
    if times == 1 and not confirmed and any(not one.found and count_words(one.rest) for one in sentences[1:]):
        return ReplyKind.UNCLEAR
    if count_other_words(sentences) > most_beside_praise(evidence, times, confirmed):
        return ReplyKind.UNCLEAR
    answers = evidence.answers and not evidence.has("praise")
    return ReplyKind.UNCLEAR if answers else ReplyKind.ACKNOWLEDGEMENT


def most_beside_praise(evidence: Evidence, times: int, confirmed: bool) -> int:
    """How many other words praise or thanks may have. With more after the thanks, the message is about those."""
    most = _MOST_BESIDE_PRAISE[min(times, len(_MOST_BESIDE_PRAISE) - 1)]
    if times > 1 and evidence.has("praise") and not evidence.has("trouble"):
        most = max(most, _MOST_BESIDE_UNTROUBLED)
    return max(most, _MOST_BESIDE_CONFIRMED) if confirmed else most


def may_mock(evidence: Evidence, confirmed: bool) -> bool:
    """Whether what stands beside praise may turn it into mockery."""
    sentences = evidence.message.sentences
    praising = [one for one in sentences if one.has("praise")]
    # "Great, I overslept", "Toll, das ist Spanisch": an exclamation before a statement may be mockery.
    # "Great, that's exactly what I needed" states nothing beside its praise.
    if praising and all(one.has("exclamation") for one in praising):
        sincere = evidence.has("thanks", "confirmed")
        least = 0.5 if evidence.has("statement", "tale") else math.inf if sincere else _LEAST_MOCKING
        if count_other_words(sentences) >= least:
            return True
    # "Thanks, very helpful, my hamster could have told me": a whole clause without praise may take it back.
    first = next(n for n, one in enumerate(sentences) if one.has("praise", "thanks"))
    clauses = [clause for one in sentences[first:] for clause in one.unpraised]
    return not confirmed and any(count_words(clause) >= _LEAST_MOCKING for clause in clauses)


def asks_after_content(evidence: Evidence) -> bool:
    """Whether thanks or praise come before a plain question in the same sentence: "thanks, and how long?".

    "Right, and how long?" may ask the same again.
    """
    if evidence.has("trouble", "defer"):
        return False
    asking = [one for one in evidence.message.sentences if one.asks]
    return all(
        one.has("question") and (one.has("thanks") or (one.has("praise") and not one.has("exclamation")))
        for one in asking
    )


def is_better_fact(evidence: Evidence) -> bool:
    """Whether the message is a statement or two with another number than the response's."""
    sentences = evidence.message.sentences
    if not evidence.disputed or evidence.has("next", "defer", "moving_on", "tale"):
        return False
    return len(sentences) <= _MOST_STATEMENTS and all(one.has("statement") and not one.asks for one in sentences)
