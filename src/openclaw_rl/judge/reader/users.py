"""Reads what a user says after a response.

A plain question, an answer to the assistant's own question, and a contradictory message are unclear.
"""

import re
from collections.abc import Sequence

from openclaw_rl.judge.reader.conclusions import Evidence, conclude
from openclaw_rl.judge.reader.facts import disputes, reminds, restores_number
from openclaw_rl.judge.reader.hints import aligned, make_hint, says_nothing
from openclaw_rl.judge.reader.kinds import Reading, ReplyKind
from openclaw_rl.judge.reader.lexicon import Lexicon, lexicon_for
from openclaw_rl.judge.reader.losses import settle_losses
from openclaw_rl.judge.reader.material import ERROR_OUTPUT, before_material
from openclaw_rl.judge.reader.messages import Text, is_for_a_judge, read_text
from openclaw_rl.judge.reader.opposites import TurnTexts, opposes
from openclaw_rl.judge.reader.parts import reacting, settle_wishes, without_request
from openclaw_rl.judge.reader.phrasebook import all_small_words
from openclaw_rl.judge.reader.relevance import Topic, is_about, is_new, names
from openclaw_rl.judge.reader.siblings import is_sibling
from openclaw_rl.judge.reader.signals import Sentence
from openclaw_rl.judge.reader.similarity import Likeness, begins_alike, compare
from openclaw_rl.judge.reader.text import normalise, own_words, shorten

_UNCLEAR = Reading(ReplyKind.UNCLEAR)
_VERDICTS = ("rejection", "correction", "moving_on", "praise", "thanks")
_VERDICTS_BUT_NEXT = ("rejection", "correction", "reminder", "praise", "thanks", "contrast")
_COMPLAINTS = ("rejection", "reminder", "contrast", "sarcasm", "doubt", "harm", "loss")
#: Words that a rephrased request shares with the first one.
_LEAST_SHARED = 2
#: Words beside the request that may be a wish. "I asked: ..." has fewer.
_LEAST_BESIDE = 3
_TELLING = ("change", "wish", "correction", "rejection", "contrast", "reminder", "statement")
_MOST_REFUSALS = 3
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
    if is_for_a_judge(message):
        return _UNCLEAR
    turn = TurnTexts(request, response)
    words = own_words(shorten(message)).strip()
    if asks(response):
        words = without_refusal(words)
    reports = ERROR_OUTPUT.search(words) is not None
    if (before := before_material(words, reports)) is not None:
        return read_before_material(before, turn)
    if reports:
        return read_error_report(words)
    if reading := read_beside_request(words, turn):
        return reading
    text = read_text(words)
    said = text.said
    settle_wishes(said, text.lexicon, likeness is not Likeness.DIFFERENT)
    if not text.has(*_VERDICTS_BUT_NEXT) and is_sibling(request, message, text.plain, text.lexicon):
        return _UNCLEAR
    again = text.lexicon.find("again", text.plain) is not None and shares(request, text.plain)
    if repeats(likeness, said, again):
        return Reading(ReplyKind.REPETITION)
    if likeness in (Likeness.EXTENDED, Likeness.NEARLY) and extends(request, message, said):
        return Reading(ReplyKind.CHANGE_REQUEST, make_hint(words))
    if goes_further(said) and not asks(response):
        return Reading(ReplyKind.MOVING_ON)
    return read_reaction(text, turn) or read_all(text, turn)


def without_refusal(words: str) -> str:
    """A message without the refusal of an offer at its beginning: "No, that's perfect", "All good, bye"."""
    lexicon = lexicon_for(normalise(words))
    for _ in range(_MOST_REFUSALS):
        if not (match := lexicon.find("refusal", aligned(words))):
            break
        words = words[: match.start()] + words[match.end() :].lstrip(" ,.!")
    return words


def read_before_material(words: str, turn: TurnTexts) -> Reading:
    """Read what a user says before the material that a message brings. Praise before it moves on."""
    reading = read_all(read_text(words), turn)
    return Reading(ReplyKind.MOVING_ON) if reading.kind is ReplyKind.ACKNOWLEDGEMENT else reading


def read_beside_request(words: str, turn: TurnTexts) -> Reading | None:
    """Read the rest of a message that repeats the whole request, if that is a wish or a correction."""
    beside = without_request(words, turn.request)
    if len(_WORD.findall(beside)) < _LEAST_BESIDE:
        return None
    text = read_text(beside)
    settle_wishes(text.said, text.lexicon, same_topic=True)
    reading = read_all(text, turn)
    return reading if reading.hint else None


def read_reaction(text: Text, turn: TurnTexts) -> Reading | None:
    """Read the part of a message that reacts, if it is clear and another part asks for something new.

    Without an announcement, the new part may belong to the reaction. Then these are clear: wishes about form, praise,
    thanks if the rest is a question or about something else, and a reading that the whole message gives too.
    """
    reacts = reacting(text.said, text.lexicon)
    if len(reacts) == len(text.said):
        return None
    part = Text(text.words, "\n".join(one.plain for one in reacts), text.lexicon, reacts)
    reading = read_all(part, turn)
    new = text.said[len(reacts)]
    announced = new.has("announcement")
    if reading.hint and (announced or part.has("wish") or read_all(text, turn).hint):
        return reading
    doubtful = text.has("contrast", "trouble") or turns(new, text.lexicon)
    if reading.kind is ReplyKind.ACKNOWLEDGEMENT and not doubtful:
        topic = Topic(text.plain[len(part.plain) :], text.lexicon, (turn.request, turn.response))
        moves_on = announced or part.has("praise") or new.has("question") or is_new(topic)
        return Reading(ReplyKind.MOVING_ON) if moves_on else None
    return reading if announced and reading.kind is ReplyKind.REJECTION else None


def goes_further(said: Sequence[Sentence]) -> bool:
    """Whether a message begins with praise or thanks and then asks for another thing, without any complaint."""
    if not said or not said[0].has("praise", "thanks") or any(complains(one) for one in said):
        return False
    content = min(said[0].found.get(signal, len(said[0].plain)) for signal in ("praise", "thanks"))
    return said[0].found.get("further", -1) > content or any(one.has("further") for one in said[1:])


def complains(sentence: Sentence) -> bool:
    """Whether a sentence complains. "I should have another one" is no correction."""
    asked = sentence.found.get("further", len(sentence.plain)) <= sentence.found.get("correction", -1)
    return sentence.has(*_COMPLAINTS) or (sentence.has("correction") and not asked)


def turns(sentence: Sentence, lexicon: Lexicon) -> bool:
    """Whether a sentence begins with "but"."""
    contrast = lexicon.find("contrast", sentence.plain)
    return contrast is not None and contrast.start() == 0


def read_all(text: Text, turn: TurnTexts) -> Reading:
    """Read a message, or a part of one, as a whole."""
    said, plain, lexicon = text.said, text.plain, text.lexicon
    settle_losses(said, turn.request)
    opposed = opposes(plain, turn, lexicon)
    words = text.words[said[0].start : said[-1].end] if said else ""
    corrects = not any(one.asks or one.has(*_VERDICTS) for one in said)
    evidence = Evidence(
        said,
        asks(turn.response),
        disputes(text.words, turn.response),
        opposed,
        corrects and reminds(words, plain, turn),
        corrects and restores_number(words, turn),
    )
    kind = conclude(evidence)
    topic = Topic(plain, lexicon, (turn.request, turn.response), text.has("praise", "contrast"), insists(text))
    mocks = text.has("harm") and text.has("praise", "thanks", "sarcasm")
    if not mocks and not is_about(kind, topic):
        return _UNCLEAR
    if kind not in (ReplyKind.CORRECTION, ReplyKind.CHANGE_REQUEST):
        return Reading(kind)
    hint = make_hint(matter(text))
    if says_nothing(hint, lexicon):
        return Reading(ReplyKind.REJECTION)
    return Reading(kind, hint)


def insists(text: Text) -> bool:
    """Whether a message must be about the response: it wants another form, or rejects what was not asked for."""
    return text.has("wish") or (text.has("rejection") and text.has("reminder"))


def matter(text: Text) -> str:
    """What a message says apart from praise and thanks before and after it."""
    telling = [one for one in text.said if not one.has("praise", "thanks") or one.has(*_TELLING)] or text.said
    return text.words[telling[0].start : telling[-1].end]


def shares(request: str, plain: str) -> bool:
    """Whether a message shares words with the request."""
    return len(names(request) & names(plain)) >= _LEAST_SHARED


def read_error_report(words: str) -> Reading:
    """Read a message that contains error output: the response led to it, and the message may say what is wrong."""
    first = ERROR_OUTPUT.search(words)
    ends = list(_END_OF_ERROR.finditer(words))
    before = words[: first.start()] if first else words
    after = words[ends[-1].end() :] if ends else ""
    words_around = f"{before}\n{after}".strip()
    if "?" in words_around:
        return _UNCLEAR
    return (
        Reading(ReplyKind.CORRECTION, make_hint(words_around))
        if len(_WORD.findall(words_around)) >= 4
        else Reading(ReplyKind.REJECTION)
    )


def repeats(likeness: Likeness, said: Sequence[Sentence], again: bool) -> bool:
    """Whether a message that resembles the request repeats it: it says so, or asks for all of it again."""
    if likeness in (Likeness.DIFFERENT, Likeness.SAME) or any(one.has("rejection", "moving_on") for one in said):
        return False
    asked = likeness is Likeness.NEARLY and bool(said) and said[-1].asks
    return asked or (again and not any(one.has("praise") for one in said))


def extends(request: str, message: str, said: Sequence[Sentence]) -> bool:
    """Whether a message is the whole request with an addition that is not a question."""
    if any(one.asks or one.has(*_VERDICTS) for one in said):
        return False
    return begins_alike(request, message, all_small_words())


def asks(response: str) -> bool:
    """Whether the response ends with a question, so that the message may be an answer."""
    return response.rstrip().rstrip("\"'”»*_) ").endswith(("?", "？"))
