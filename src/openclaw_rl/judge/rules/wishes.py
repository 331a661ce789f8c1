"""Reads from a user's message what they want of answers: "shorter, please", "call me Sam", "always in metric".

A wish is an imperative, or a part of one, about how to answer. A request to do something is none. Code, quotations,
material that a message brings along, reports of what others say, and words for a judge yield none.
"""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from openclaw_rl.judge.rules.grammar import WeighedSentence, Weighing, WishGrammar, all_grammars, grammars_for
from openclaw_rl.judge.rules.instructions import form_wishes, tears
from openclaw_rl.judge.rules.phrases import (
    ends_with_question,
    mask_quotations,
    normalise,
    normalise_in_place,
    sentence_spans,
    shorten,
    without_code,
)
from openclaw_rl.judge.rules.restating import (
    MAX_CHARACTERS,
    TEMPLATE,
    WishFound,
    dangles,
    make_wish,
    needs_more,
    restate_core,
    rewrite,
    said_wish,
)
from openclaw_rl.judge.rules.signals import (
    ERROR_OUTPUT,
    Message,
    Sentence,
    before_material,
    begins_something_new,
    is_for_a_judge,
    read_message,
    without_request,
)
from openclaw_rl.judge.rules.verdict import Reading, ReplyKind, read_user
from openclaw_rl.types import Wish

#: Wishes of one message. A message with more of them is a text that somebody pasted.
MOST_WISHES = 4
_MOST_CLAUSES = 8
#: The weight of a sentence that is a wish beside another one.
_SURE = 0.0
#: A message of more weight states a wish, though it may read like praise or the next request.
_SURE_OF_MESSAGE = 3.0
#: A message of less weight states no wish for all answers beyond plain ones about form, and names.
_UNLIKELY = 0.0
#: By how many characters a sentence says more than a clause of it.
_MORE = 8
_MOST_STRIPPED = 10
_LETTERS = re.compile(r"[^\W\d_]+")
_CLAUSE_END = re.compile(r"[,;:](?=\s)|[\uff0c\uff1b\uff1a\u3001]|\s[-\u2013\u2014]\s|[()]")
_EDGES = " \t\n,;:.!?\u2026-\u2013\u2014\"'()\u3002\uff01\uff1f\uff0c\uff1b\uff1a\u3001"
_ENDS = " \t\n,;:!\u2026-\u2013\u2014(\u3002\uff01\uff0c\uff1b\uff1a\u3001."
#: Quotation marks around a wanted answer.
_QUOTES = {'"': '"', "\u201c": "\u201d", "\u201e": "\u201c", "\u00ab": "\u00bb", "'": "'"}
#: Words, or characters of a script without spaces, of a wanted answer: "Better: shorter." names a wish, and no answer.
_WANTED_ANSWER = re.compile(r"(?:\w+\W+){2}\w|[\u3040-\u9fff\uac00-\ud7af]{4}")
#: The topic of each matter of the instructions in `hints.py`; of others, the name of the matter.
_TOPICS = {
    "formatting": "format",
    "lists": "format/lists",
    "bold": "format/bold",
    "boxed": "format/boxed",
    "warmth": "tone",
}
#: Wishes about these are for all answers, also beside a new question.
_PERSONAL = frozenset({"address", "voice"})
_COMPLAINTS = frozenset({ReplyKind.CHANGE_REQUEST, ReplyKind.CORRECTION})
_CONTENT = frozenset({ReplyKind.ACKNOWLEDGEMENT, ReplyKind.MOVING_ON})


class Heard(NamedTuple):
    """A message, and what is known of it before its wishes are read."""

    message: Message
    reading: Reading
    addition: str
    """What it adds to the request that it repeats."""
    about_document: bool
    """The request was for a text or a program."""
    after_turn: bool
    """There was a turn before it."""
    response: str
    weighed: Weighing
    grammar: WishGrammar | None

    @property
    def about_this_answer(self) -> bool:
        return is_follow_up(self.message) or self.weighed.about_one_text

    @property
    def unlikely(self) -> bool:
        """Whether its words are not those of a wish for all answers. A complaint about the answer may be one."""
        known = self.grammar and self.grammar.count_small_words(self.message.normalised) > 0
        doubtful = bool(known) and not self.addition and self.reading.kind not in _COMPLAINTS
        asks_about_answer = self.after_turn and self.weighed.only_asks
        return doubtful and not asks_about_answer and self.weighed.score < _UNLIKELY

    @property
    def this_once(self) -> bool:
        """Whether it says that it is about one answer, or is praise, or only asks for more."""
        if self.grammar and not self.weighed.standing and self.grammar.patterns["once"].search(self.message.normalised):
            return True
        content = self.reading.kind in _CONTENT and self.weighed.score < _SURE_OF_MESSAGE
        return is_follow_up(self.message) or (content and not self.weighed.standing)


def read_wishes(text: str, request: str = "", response: str = "", weighs: bool = True) -> list[Wish]:
    """The wishes in a user's message, at most one for each topic.

    `request` and `response` are the turn before the message, if there was one. A message that repeats the request with
    a wish complains about the answer. If the request asked for a text or a program, wishes about form are about that.
    `weighs`: what no pattern describes is weighed.
    """
    if is_unsafe(text):
        return []
    words = without_code(shorten(text)).strip()
    addition = without_request(words, request)
    message = read_message(without_material(addition or words))
    reading = read_user(request, response, text)
    about_document = asks_for_document(request)
    weighed, grammar = weigh(message.words, response, about_document)
    heard = Heard(message, reading, addition, about_document, bool(request or response), response, weighed, grammar)
    complained = complaint(message, reading, words, addition)
    form = form_wishes(complained)
    wishes: list[Wish] = []
    if weighs and form and form.says_more and weighed.stated:
        # Beside other words, whole sentences say it better than a plain instruction.
        spans = ((sentence.start, sentence.end) for sentence in message.sentences)
        parts = [(message.words[start:end], (start, end)) for start, end in spans]
        wishes = hear(heard, [part for part in parts if is_plain(part[0])], weighs)
    if not any(wish.lasting for wish in wishes):
        wishes = hear(heard, [(complained, (0, len(message.words)))], weighs)
    wishes = [one for one in wishes if not any(is_part(one, other) for other in wishes)]
    return wishes if len(wishes) <= MOST_WISHES else []


def hear(heard: Heard, complaints: Sequence[tuple[str, tuple[int, int]]], weighs: bool) -> list[Wish]:
    """The wishes of a message: about form in complaints and their places, those that patterns find, and others."""
    wishes: list[Wish] = []
    covered = [place for words, place in complaints if add_forms(wishes, heard, words)]
    topics = {wish.topic.partition("/")[0] for wish in wishes}
    covered += add_patterns(wishes, heard, topics)
    lasting = any(wish.lasting for wish in wishes)
    # Wishes that were read as wishes for one answer say nothing about others.
    once = heard.this_once or (bool(wishes) and not lasting and not heard.weighed.standing)
    if weighs and heard.grammar and (lasting or not once):
        # Beside a wish that patterns read, only other sentences count.
        stated = heard.weighed.stated
        stated = [one for one in stated if not lasting or (one.weight > _SURE and not overlaps(one, covered))]
        for found in said_wish(stated, heard.message.words, heard.response, heard.grammar, beside=lasting):
            # A complaint beside a wish about the same says no more.
            if not any(wish.lasting and wish.topic == found.topic for wish in wishes):
                add_wish(wishes, found, lasting=True)
    return wishes


def is_plain(words: str) -> bool:
    """Whether words are only about form."""
    form = form_wishes(words)
    return form is not None and not form.says_more


def add_forms(wishes: list[Wish], heard: Heard, words: str) -> bool:
    """Add the wishes about form in a complaint, and say whether there are any."""
    asks_first = not heard.after_turn and heard.message.has("question")
    conditional = heard.about_document or heard.about_this_answer or asks_first
    found = list(form_wishes_of(words, heard.response))
    for one in found:
        add_wish(wishes, one, lasts(one, heard.message.words, bool(heard.addition), conditional) and not heard.unlikely)
    return bool(found)


def add_patterns(wishes: list[Wish], heard: Heard, topics: set[str]) -> list[tuple[int, int]]:
    """Add the wishes that patterns find in sentences, but for those about some topics; the places of the sentences."""
    message, asked, covered = heard.message, False, []
    for sentence in message.sentences:
        in_sentence = list(read_sentence_wishes(sentence, message, bool(wishes)))
        if heard.grammar and not topics:
            in_sentence = list(whole(in_sentence, sentence, message.words, heard.weighed.stated, heard.grammar))
        complains = heard.after_turn and heard.reading.kind in _COMPLAINTS
        asks_too = bool(in_sentence) and not heard.addition and asks_after(sentence, message, complains)
        covered += [(sentence.start, sentence.end)] * bool(in_sentence)
        for found in in_sentence:
            personal = found.topic in _PERSONAL
            if heard.reading.kind in _CONTENT and not (found.standing or personal):
                continue
            after_request = found.conditional and heard.reading.kind not in _COMPLAINTS
            about_text = heard.about_document and found.topic != "address"
            conditional = after_request or about_text or heard.about_this_answer
            conditional = conditional or ((asked or asks_too) and not personal)
            lasting = lasts(found, sentence.normalised, bool(heard.addition), conditional)
            # A plain instruction says it better than the user's words.
            if found.topic.partition("/")[0] not in topics:
                add_wish(wishes, found, lasting and (personal or not heard.unlikely))
        begins = not heard.addition and not in_sentence and begins_something_new(sentence, message.lexicon)
        asked = asked or begins
    return covered


def is_part(wish: Wish, other: Wish) -> bool:
    """Whether another wish says all that a wish says, and more."""
    core = wish.instruction.rstrip(".!")
    return wish.lasting == other.lasting and len(core) < len(other.instruction) - 1 and core in other.instruction


def asks_for_document(request: str) -> bool:
    """Whether a request is for a text or a program."""
    return any(grammar.patterns["document"].search(normalise(shorten(request))) for grammar in all_grammars())


def weigh(words: str, response: str, about_document: bool) -> tuple[Weighing, WishGrammar | None]:
    """Weigh a message in its likeliest language; without a grammar if that has no signals to weigh."""
    likely = grammars_for(normalise(words))
    counts = [len(_LETTERS.findall(normalise(words))) - len(grammar.content(normalise(words))) for grammar in likely]
    for grammar, count in zip(likely, counts, strict=True):
        if grammar.scale and count and count == max(counts):
            return grammar.scale.weigh(words, response, about_document), grammar
    return Weighing(0.0, [], False, False, False), None


def whole(
    found: Sequence[WishFound], sentence: Sentence, words: str, stated: Sequence[WeighedSentence], grammar: WishGrammar
) -> Iterator[WishFound]:
    """The wishes of the clauses of a sentence, without those that need more of it: the whole sentence says them."""
    said = next((one for one in stated if overlaps(one, [(sentence.start, sentence.end)])), None)
    restated = restate_core(said, words, "", "", grammar, False).found if said else None
    for one in found:
        plain = any(
            form.instruction == one.instruction for form in form_wishes_of(words[sentence.start : sentence.end])
        )
        if restated and not plain and restated.instruction.rstrip(".!") in one.instruction:
            # Without its reasons.
            one = one._replace(instruction=restated.instruction)
        more = restated and not plain and len(restated.instruction) > len(one.instruction) + _MORE
        if one.undoes or not (more or dangles(one.instruction, grammar) or needs_more(one.instruction, grammar)):
            yield one


def overlaps(said: WeighedSentence, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a sentence is in any of some parts of the message."""
    return any(said.start < end and start < said.end for start, end in spans)


def split_wanted(text: str) -> tuple[str, str]:
    """A message without the answer that its writer wanted, and that answer: "No. It should say: …".

    The second part is empty if there is none.
    """
    normalised = normalise_in_place(text)
    found = (grammar.patterns["wanted"].search(normalised) for grammar in grammars_for(normalised[:MAX_CHARACTERS]))
    match = next(filter(None, found), None)
    wanted = text[match.end() :].strip() if match else ""
    if wanted[:1] in _QUOTES and wanted[-1:] == _QUOTES[wanted[:1]]:
        wanted = wanted[1:-1].strip()
    if match is None or not _WANTED_ANSWER.search(wanted) or is_unsafe(text):
        return text, ""
    return text[: match.start()], wanted


def topic_of(text: str) -> str:
    """What one wish that somebody wrote is about; empty if the text cannot be read as one wish."""
    wishes = read_wishes(text)
    return wishes[0].topic if len(wishes) == 1 else ""


def read_wish_as_complaint(text: str, request: str, response: str) -> Reading:
    """Read a message that the rules for verdicts do not understand: a wish for all answers complains about the last.

    How to address the user says nothing about the answer, and what follows a question of the assistant may answer it.
    """
    message = read_message(without_code(shorten(text)))
    content = message.has("praise", "thanks") and not message.has("contrast")
    wishes = () if content or ends_with_question(response) else read_wishes(text, request, response, weighs=False)
    instructions = [wish.instruction for wish in wishes if wish.lasting and wish.topic != "address"]
    return Reading(ReplyKind.CHANGE_REQUEST, " ".join(instructions)) if instructions else Reading(ReplyKind.UNCLEAR)


def is_unsafe(text: str) -> bool:
    """Whether a message has tokens of chat templates, or tries to change whom the assistant or the judge obeys."""
    normalised = normalise(shorten(text))
    unsafe = any(grammar.patterns["unsafe"].search(normalised) for grammar in all_grammars())
    return unsafe or TEMPLATE.search(text) is not None or is_for_a_judge(text)


def without_material(words: str) -> str:
    """The user's words without error output and material that a message brings along."""
    error = ERROR_OUTPUT.search(words)
    words = words[: error.start()] if error else words
    before = before_material(words, reports_error=False)
    return words if before is None else before


def complaint(message: Message, reading: Reading, words: str, addition: str) -> str:
    """The words that complain about the form of the answer: what is added to a repeated request, or a hint."""
    if addition:
        return addition
    # A tale and error output may resemble a wish.
    tells = all(sentence.has("tale") for sentence in message.sentences) or ERROR_OUTPUT.search(words) is not None
    said = normalise(whole_sentence(reading.hint, message.words))
    tells = tells or any(one.scale.patterns["tale"].search(said) for one in grammars_for(said)[:1] if one.scale)
    return whole_sentence(reading.hint, message.words) if reading.kind in _COMPLAINTS and not tells else ""


def whole_sentence(hint: str, words: str) -> str:
    """A hint with the words before it in its sentence. They are no courtesy in "so many bold words"."""
    place = words.find(hint)
    start = max((start for start, _ in sentence_spans(words) if start <= place), default=0)
    return words[start : place + len(hint)] if place > 0 else hint


def form_wishes_of(words: str, response: str = "") -> Iterator[WishFound]:
    """The wishes about form in a complaint, or in a clause that is a wish, as plain instructions."""
    form = form_wishes(words, response)
    normalised = normalise(words)
    for about, instruction in form.instructions.items() if form else ():
        topic = _TOPICS.get(about, about)
        special = (grammar.topic(normalised) for grammar in grammars_for(normalised))
        topic = next((one for one in special if one.startswith(f"{topic}/")), topic)
        yield WishFound(instruction.text, topic, instruction.stronger)


def read_sentence_wishes(sentence: Sentence, message: Message, after_wish: bool) -> Iterator[WishFound]:
    """The wishes of a sentence in the user's words, or as plain instructions if they are about form.

    `after_wish`: there is a wish before it in the message.
    """
    words = message.words[sentence.start : sentence.end]
    normalised = normalise_in_place(mask_quotations(words))
    grammars = grammars_for(normalised)
    if any_finds(grammars, "reported", normalised):
        return
    standing = any_finds(grammars, "standing", normalised)
    kinds = ["wishes", *["standing_wishes"] * standing, *["after_wish"] * after_wish]
    for start, end in clauses(words, grammars):
        found = next(filter(None, (read_clause(words[start:end], one, kinds) for one in grammars)), None)
        if found:
            before = normalised[:start].strip()
            # The words before a clause may ask for something. The wish is then a condition of that.
            requested = message.lexicon.has("new_thing", before) or any_finds(grammars_for(before), "document", before)
            yield found._replace(standing=standing, conditional=requested)


def clauses(words: str, grammars: Sequence[WishGrammar]) -> list[tuple[int, int]]:
    """The start and end of each clause, and of the whole sentence if it has several."""
    masked = mask_quotations(words)
    normalised = normalise_in_place(masked)
    ends = {match.span() for match in _CLAUSE_END.finditer(masked)}
    ends |= {match.span() for grammar in grammars[:1] for match in grammar.patterns["split"].finditer(normalised)}
    places = sorted(ends)[: _MOST_CLAUSES - 1]
    spans = list(zip([0, *(end for _, end in places)], [*(start for start, _ in places), len(masked)], strict=True))
    return spans if len(spans) == 1 else [*spans, (0, len(masked))]


def read_clause(words: str, grammar: WishGrammar, kinds: Sequence[str]) -> WishFound | None:
    """The wish that a clause is, as an instruction; None if it is none. `kinds` are the lists of the grammar to try."""
    whole = normalise(words.strip(_EDGES))
    words = strip_courtesy(words, grammar)
    normalised = normalise(mask_quotations(words))
    never = grammar.patterns["never"]
    if not normalised or len(words) > MAX_CHARACTERS or never.fullmatch(whole) or never.fullmatch(normalised):
        return None
    found = rewrite(words, grammar, grammar.rewritten)
    if not found and any(pattern.fullmatch(normalised) for kind in kinds for pattern in grammar.wishes[kind]):
        found = make_wish(words, normalised, grammar)
    # Small models follow the plain instructions far more often than other words.
    form = form_wishes(words) if found else None
    return next(form_wishes_of(words)) if form and not form.says_more else found


def strip_courtesy(words: str, grammar: WishGrammar) -> str:
    """A clause without courtesy and introductions before and after it."""
    words = trim(words)
    for _ in range(_MOST_STRIPPED):
        normalised = normalise_in_place(mask_quotations(words))
        if (lead := grammar.patterns["lead"].match(normalised)) and lead.end() < len(words):
            words = trim(words[lead.end() :])
        elif (tail := grammar.patterns["tail"].search(normalised)) and tail.start() > 0:
            if grammar.scale and tears(words[: tail.start()], grammar.scale.patterns):
                break
            words = trim(words[: tail.start()])
        else:
            break
    return words


def trim(words: str) -> str:
    """A clause without marks around it. A quotation at its end stays whole."""
    trimmed = words.strip(_EDGES)
    return f'{trimmed}"' if trimmed.count('"') % 2 and words.rstrip(_ENDS)[-1:] == '"' else trimmed


def asks_after(sentence: Sentence, message: Message, complains: bool) -> bool:
    """Whether a sentence with a wish asks for something new after it: "In one word: is Paris in France?"."""
    if sentence.found.get("question", 0) and not complains:
        return True
    words = message.words[sentence.start : sentence.end]
    before, colon, after = words.replace("\uff1a", ":").partition(":")
    return bool(colon and before and len(after.split()) > 1) and not sentence.has("announcement")


def is_follow_up(message: Message) -> bool:
    """Whether a message only asks for more of this answer: "Can you give an example?".

    If it also says what was wrong ("Too abstract. …", "Thanks, but …"), it is a complaint.
    """
    if len(message.sentences) != 1 or message.has("contrast"):
        return False
    said = message.sentences[0].normalised
    return any(grammar.patterns["follow_up"].match(said) for grammar in grammars_for(message.normalised))


def lasts(found: WishFound, words: str, repeats: bool, conditional: bool) -> bool:
    """Whether a wish is for all answers. "Again, and short this time" repeats a request, so it is."""
    normalised = normalise(words)
    grammars = grammars_for(normalised)
    if repeats or found.standing or any_finds(grammars, "standing", normalised):
        return True
    return not conditional and not any_finds(grammars, "once", normalised)


def add_wish(wishes: list[Wish], found: WishFound, lasting: bool) -> None:
    """Add a wish in place of earlier ones of the same topic, unless one of them says all that it says."""
    wish = Wish(found.instruction, found.topic, lasting, found.stronger, undoes=found.undoes)
    if not any(wish.repeats(one) for one in wishes):
        wishes[:] = [one for one in wishes if not wish.replaces(one)]
        wishes.append(wish)


def any_finds(grammars: Sequence[WishGrammar], name: str, normalised: str) -> bool:
    """Whether a pattern of any grammar is in a normalised text."""
    return any(grammar.patterns[name].search(normalised) for grammar in grammars)
