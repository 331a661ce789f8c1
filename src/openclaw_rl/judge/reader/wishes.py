"""Reads from a user's message what they want of answers: "shorter, please", "call me Sam", "always in metric".

A wish is an imperative, or a part of one, about how to answer. A request to do something is none. Code, quotations,
material that a message brings along, reports of what others say, and words for a judge yield none.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from openclaw_rl.judge.reader.hints import aligned
from openclaw_rl.judge.reader.instructions import form_wishes
from openclaw_rl.judge.reader.kinds import Reading, ReplyKind
from openclaw_rl.judge.reader.material import ERROR_OUTPUT, before_material
from openclaw_rl.judge.reader.messages import Text, is_for_a_judge, read_text
from openclaw_rl.judge.reader.parts import begins_something, without_request
from openclaw_rl.judge.reader.phrasebook import all_small_words
from openclaw_rl.judge.reader.signals import Sentence
from openclaw_rl.judge.reader.text import QUOTATION, normalise, own_words, sentences, shorten
from openclaw_rl.judge.reader.users import asks, read_user
from openclaw_rl.judge.reader.wish_grammar import WishGrammar, all_grammars, grammars_for
from openclaw_rl.types import Wish

#: Characters of an instruction. A longer one is a text, not a wish.
MAX_CHARACTERS = 200
#: Wishes of one message. A message with more of them is a text that somebody pasted.
MOST_WISHES = 4
_MOST_CLAUSES = 8
_MOST_STRIPPED = 10
_CLAUSE_END = re.compile(r"[,;:](?=\s)|[\uff0c\uff1b\uff1a\u3001]|\s[-\u2013\u2014]\s|[()]")
_EDGES = " \t\n,;:.!?\u2026-\u2013\u2014\"'()\u3002\uff01\uff1f\uff0c\uff1b\uff1a\u3001"
_ENDS = " \t\n,;:!\u2026-\u2013\u2014(\u3002\uff01\uff0c\uff1b\uff1a\u3001."
#: Tokens of chat templates. A message that has them is no plain wish.
_TEMPLATE = re.compile(
    r"<\|[^>\n]{0,40}\|?>|<</?SYS>>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>|<\uff5c|\{\{|\{%|</?(?:system|user|assistant|think)>",
    re.IGNORECASE,
)
#: Categories of characters that an instruction does not have.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
#: The topic of each matter of `instructions.py`.
_TOPICS = {
    "length": "length",
    "formatting": "format",
    "lists": "format/lists",
    "bold": "format/bold",
    "boxed": "format/boxed",
    "warmth": "tone",
    "simplicity": "simplicity",
}
#: Wishes about these are for all answers, also beside a new question.
_PERSONAL = frozenset({"address", "voice"})
_COMPLAINTS = frozenset({ReplyKind.CHANGE_REQUEST, ReplyKind.CORRECTION})
_CONTENT = frozenset({ReplyKind.ACKNOWLEDGEMENT, ReplyKind.MOVING_ON})


class Context(NamedTuple):
    """What stands around a clause."""

    standing: bool
    """The sentence says that it is about all answers."""
    beside: bool
    """There is a wish before it in the message."""


class Found(NamedTuple):
    """A wish in a sentence."""

    instruction: str
    topic: str
    standing: bool = False
    """It says that it is for all answers."""
    conditional: bool = False
    """It comes after a request in the same sentence: "Write a letter, no emojis please"."""
    stronger: str = ""
    """The instruction for somebody who wishes the same again."""


def read_wishes(message: str, request: str = "", response: str = "") -> list[Wish]:
    """The wishes in a user's message, at most one for each topic.

    `request` and `response` are the turn before the message, if there was one. A message that repeats the request with
    a wish complains about the answer. If the request asked for a text or a program, wishes about form are about that.
    """
    if is_unsafe(message):
        return []
    words = own_words(shorten(message)).strip()
    beside = without_request(words, request)
    text = read_text(users_own(beside or words))
    reading = read_user(request, response, message)
    # A tale and error output may resemble a wish.
    tells = all(sentence.has("tale") for sentence in text.said) or ERROR_OUTPUT.search(words) is not None
    complains = reading.kind in _COMPLAINTS and not tells
    complaint = beside or (whole_sentence(reading.hint, text.words) if complains else "")
    about_document = any(grammar.document.search(normalise(shorten(request))) for grammar in all_grammars())
    for_this_answer = about_document or is_follow_up(text)
    wishes: list[Wish] = []
    for one in form_found(complaint, response):
        lasting = lasts(one, text.words, bool(beside), for_this_answer)
        add(wishes, Wish(one.instruction, one.topic, lasting, one.stronger))
    told = {wish.topic.partition("/")[0] for wish in wishes}
    asked = False
    for sentence in text.said:
        found = list(read_sentence_wishes(sentence, text, bool(wishes)))
        asks_too = not beside and asks_beside(sentence, text, found)
        for one in found:
            if reading.kind in _CONTENT and not (one.standing or one.topic in _PERSONAL):
                continue
            after_request = one.conditional and reading.kind not in _COMPLAINTS
            conditional = after_request or ((asked or asks_too) and one.topic not in _PERSONAL)
            about_text = about_document and one.topic != "address"
            about_this = about_text or is_follow_up(text)
            lasting = lasts(one, sentence.plain, bool(beside), conditional or about_this)
            # A plain instruction says it better than the user's words.
            if one.topic.partition("/")[0] not in told:
                add(wishes, Wish(one.instruction, one.topic, lasting, one.stronger))
        asked = asked or (not beside and not found and begins_something(sentence, text.lexicon))
    return wishes if len(wishes) <= MOST_WISHES else []


def read_complaint(message: str, request: str, response: str) -> Reading:
    """Read a message that the rules for verdicts do not understand: a wish for all answers complains about the last.

    How to address the user says nothing about the answer, and what follows a question of the assistant may answer it.
    """
    text = read_text(own_words(shorten(message)))
    content = text.has("praise", "thanks") and not text.has("contrast")
    wishes = () if content or asks(response) else read_wishes(message, request, response)
    instructions = [wish.instruction for wish in wishes if wish.lasting and wish.topic != "address"]
    return Reading(ReplyKind.CHANGE_REQUEST, " ".join(instructions)) if instructions else Reading(ReplyKind.UNCLEAR)


def is_unsafe(message: str) -> bool:
    """Whether a message has tokens of chat templates, or tries to change whom the assistant or the judge obeys."""
    plain = normalise(shorten(message))
    unsafe = any(grammar.unsafe.search(plain) for grammar in all_grammars())
    return unsafe or _TEMPLATE.search(message) is not None or is_for_a_judge(message)


def users_own(words: str) -> str:
    """The user's own words: without error output and material that a message brings along."""
    error = ERROR_OUTPUT.search(words)
    words = words[: error.start()] if error else words
    before = before_material(words, reports=False)
    return words if before is None else before


def whole_sentence(hint: str, words: str) -> str:
    """A hint with the words before it in its sentence. They are no courtesy in "so many bold words"."""
    place = words.find(hint)
    start = max((start for start, _ in sentences(words) if start <= place), default=0)
    return words[start : place + len(hint)] if place > 0 else hint


def form_found(words: str, response: str = "") -> Iterator[Found]:
    """The wishes about form in a complaint, or in a clause that is a wish, as plain instructions."""
    form = form_wishes(words, response)
    plain = normalise(words)
    for about, instruction in form.instructions.items() if form else ():
        topic = _TOPICS.get(about, about)
        special = (grammar.topic(plain) for grammar in grammars_for(plain))
        topic = next((one for one in special if one.startswith(f"{topic}/")), topic)
        yield Found(instruction.text, topic, stronger=instruction.stronger)


def read_sentence_wishes(sentence: Sentence, text: Text, beside: bool) -> Iterator[Found]:
    """The wishes of a sentence in the user's words, or as plain instructions if they are about form.

    `beside`: there is a wish before it in the message.
    """
    words = text.words[sentence.start : sentence.end]
    plain = aligned(mask(words))
    grammars = grammars_for(plain)
    if any(grammar.reported.search(plain) for grammar in grammars):
        return
    standing = any(grammar.standing.search(plain) for grammar in grammars)
    context = Context(standing, beside)
    for start, end in clauses(words, grammars):
        found = next(filter(None, (read_clause(words[start:end], one, context) for one in grammars)), None)
        if found:
            yield found._replace(standing=standing, conditional=requests(plain[:start].strip(), text))


def requests(before: str, text: Text) -> bool:
    """Whether the words before a clause ask for something: the wish is a condition of that."""
    fresh = text.lexicon.find("fresh", before) is not None
    return fresh or any(grammar.document.search(before) for grammar in grammars_for(before))


def clauses(words: str, grammars: Sequence[WishGrammar]) -> list[tuple[int, int]]:
    """The start and end of each clause, and of the whole sentence if it has several."""
    masked = mask(words)
    plain = aligned(masked)
    ends = {match.span() for match in _CLAUSE_END.finditer(masked)}
    ends |= {match.span() for grammar in grammars[:1] for match in grammar.split.finditer(plain)}
    places = sorted(ends)[: _MOST_CLAUSES - 1]
    spans = list(zip([0, *(end for _, end in places)], [*(start for start, _ in places), len(plain)], strict=True))
    return spans if len(spans) == 1 else [*spans, (0, len(plain))]


def read_clause(words: str, grammar: WishGrammar, context: Context) -> Found | None:
    """The wish that a clause is, as an instruction; None if it is none."""
    whole = normalise(words.strip(_EDGES))
    words = strip_courtesy(words, grammar)
    plain = normalise(mask(words))
    if not plain or len(words) > MAX_CHARACTERS or any(map(grammar.never.fullmatch, (whole, plain))):
        return None
    if found := read_own_words(words, plain, grammar, context):
        # Small models follow the plain instructions far more often than other words.
        form = form_wishes(words)
        return next(form_found(words)) if form and not form.more else found
    return None


def read_own_words(words: str, plain: str, grammar: WishGrammar, context: Context) -> Found | None:
    """The wish that a clause without courtesy is, in the user's words; `plain` is the clause normalised."""
    for when, say in grammar.rewritten:
        if match := when.fullmatch(aligned(mask(words))):
            parts = (words[match.start(n) : match.end(n)] for n in range(1, match.re.groups + 1))
            instruction = say.format(*map(lower_first, parts))
            return make(instruction, normalise(instruction), grammar)
    patterns = [
        *grammar.wishes,
        *(grammar.standing_wishes if context.standing else ()),
        *(grammar.beside if context.beside else ()),
    ]
    if any(pattern.fullmatch(plain) for pattern in patterns):
        return make(words, plain, grammar)
    return None


def make(words: str, plain: str, grammar: WishGrammar) -> Found | None:
    """A wish in the user's words as a sentence; None if it is not plain text."""
    text = " ".join(words.split())
    if not text or len(text) >= MAX_CHARACTERS or _TEMPLATE.search(text) or not is_plain(text):
        return None
    stop = "" if text[-1] in ".!?\u3002\uff01\uff1f" else "\u3002" if "\u3400" <= text[-1] <= "\u9fff" else "."
    return Found(text[0].upper() + text[1:] + stop, grammar.topic(plain))


def is_plain(text: str) -> bool:
    """Whether a text has no control characters and no other characters that cannot be seen."""
    return not any(unicodedata.category(char) in _UNSEEN for char in text)


def strip_courtesy(words: str, grammar: WishGrammar) -> str:
    """A clause without courtesy and introductions before and after it."""
    words = trim(words)
    for _ in range(_MOST_STRIPPED):
        plain = aligned(mask(words))
        if (lead := grammar.lead.match(plain)) and lead.end() < len(words):
            words = trim(words[lead.end() :])
        elif (tail := grammar.tail.search(plain)) and tail.start() > 0:
            words = trim(words[: tail.start()])
        else:
            break
    return words


def trim(words: str) -> str:
    """A clause without marks around it. A quotation at its end stays whole."""
    trimmed = words.strip(_EDGES)
    return f'{trimmed}"' if trimmed.count('"') % 2 and words.rstrip(_ENDS)[-1:] == '"' else trimmed


def asks_beside(sentence: Sentence, text: Text, found: Sequence[Found]) -> bool:
    """Whether a sentence asks for something new beside its wishes: "In one word: is Paris in France?"."""
    if not found:
        return False
    words = text.words[sentence.start : sentence.end]
    before, colon, after = words.replace("\uff1a", ":").partition(":")
    return bool(colon and before and len(after.split()) > 1) and not sentence.has("announcement")


def is_follow_up(text: Text) -> bool:
    """Whether a message only asks for more of this answer: "Can you give an example?".

    If it also says what was wrong ("Too abstract. …", "Thanks, but …"), it is a complaint.
    """
    if len(text.said) != 1 or text.has("contrast"):
        return False
    return any(grammar.follow_up.match(text.said[0].plain) for grammar in grammars_for(text.plain))


def lasts(found: Found, said: str, repeats: bool, conditional: bool) -> bool:
    """Whether a wish is for all answers. "Again, and short this time" repeats a request, so it is."""
    plain = normalise(said)
    grammars = grammars_for(plain)
    if repeats or found.standing or any(grammar.standing.search(plain) for grammar in grammars):
        return True
    return not conditional and not any(grammar.once.search(plain) for grammar in grammars)


def lower_first(words: str) -> str:
    """A part of a clause with a small first letter, unless it is a name or an abbreviation."""
    first, _, rest = words.partition(" ")
    return words[:1].lower() + words[1:] if normalise(first) in all_small_words() and rest else words


def add(wishes: list[Wish], wish: Wish) -> None:
    """Add a wish in place of earlier ones of the same topic, unless one of them says all that it says."""
    if not any(wish.repeats(one) for one in wishes):
        wishes[:] = [one for one in wishes if not wish.replaces(one)]
        wishes.append(wish)


def mask(text: str) -> str:
    """The text with each quotation replaced by as many underscores."""
    return QUOTATION.sub(lambda match: "_" * len(match[0]), text)
