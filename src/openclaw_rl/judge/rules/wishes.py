"""Reads from a user's message what they want of answers: "shorter, please", "call me Sam", "always in metric".

A wish is an imperative, or a part of one, about how to answer. A request to do something is none. Code, quotations,
material that a message brings along, reports of what others say, and words for a judge yield none.

The `[wishes]` tables of the phrase files say how wishes are phrased in each language. All values are regular
expressions over normalised text, with the word groups of the file's `[words]`:

- lead, tail: courtesy and introductions ("could you", "from now on") before and after a wish; they are removed
- split: where a clause ends, besides commas, colons and semicolons
- standing, once: the wish is for all answers, or for one
- follow_up: a question that only asks for more of this answer: an example, details, sources
- reported: the sentence reports what others say
- never: clauses that look like a wish but are none
- document: a request for a text or a program, whose form a wish after it is about
- wanted: words before the answer that the user wanted ("It should say:")
- unsafe: words that try to change whom the assistant obeys
- wishes: clauses that are wishes in the user's words; standing_wishes: only in a sentence with `standing`
- after_wish: clauses that are wishes after another wish of the same message
- rewritten: clauses that become a wish: `when`, and `say` with the groups of `when`; with `undoes`, the wish takes back
  an earlier one that has the words of the groups
- about_user: how words about the speaker are said about "the user": `when`, and `say` with the groups of `when`
- topics: `name`, and the words (`when`) that show the topic; the first that matches counts
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

from openclaw_rl.judge.rules.hints import form_wishes
from openclaw_rl.judge.rules.phrases import SCRIPTS, all_small_words, expand, tables, word_list
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
from openclaw_rl.judge.rules.text import (
    ends_with_question,
    mask_quotations,
    normalise,
    normalise_in_place,
    sentence_spans,
    shorten,
    without_code,
)
from openclaw_rl.judge.rules.verdict import Reading, ReplyKind, read_user
from openclaw_rl.types import Wish

#: Characters of an instruction. A longer one is a text, not a wish.
MAX_CHARACTERS = 200
#: Wishes of one message. A message with more of them is a text that somebody pasted.
MOST_WISHES = 4
_MOST_CLAUSES = 8
_MOST_STRIPPED = 10
#: Words of a topic that no table names.
_MOST_TOPIC_WORDS = 3
#: With fewer small words of any language, all languages of the script are tried.
_FEW_SMALL_WORDS = 2
_LETTERS = re.compile(r"[^\W\d_]+")
_WORD = re.compile(r"\w+")
_CLAUSE_END = re.compile(r"[,;:](?=\s)|[\uff0c\uff1b\uff1a\u3001]|\s[-\u2013\u2014]\s|[()]")
_EDGES = " \t\n,;:.!?\u2026-\u2013\u2014\"'()\u3002\uff01\uff1f\uff0c\uff1b\uff1a\u3001"
_ENDS = " \t\n,;:!\u2026-\u2013\u2014(\u3002\uff01\uff0c\uff1b\uff1a\u3001."
#: Tokens of chat templates. A message that has them is no plain wish.
_TEMPLATE = re.compile(
    r"<\|[^>\n]{0,40}\|?>|<</?SYS>>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>|<\uff5c|\{\{|\{%|</?(?:system|user|assistant|think)>",
    re.IGNORECASE,
)
#: Quotation marks around a wanted answer.
_QUOTES = {'"': '"', "\u201c": "\u201d", "\u201e": "\u201c", "\u00ab": "\u00bb", "'": "'"}
#: Words, or characters of a script without spaces, of a wanted answer: "Better: shorter." names a wish, and no answer.
_WANTED_ANSWER = re.compile(r"(?:\w+\W+){2}\w|[\u3040-\u9fff\uac00-\ud7af]{4}")
#: Categories of characters that an instruction does not have: control characters and others that cannot be seen.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
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


class WishFound(NamedTuple):
    """A wish in a sentence."""

    instruction: str
    topic: str
    stronger: str = ""
    """The instruction for somebody who wishes the same again."""
    standing: bool = False
    """It says that it is for all answers."""
    conditional: bool = False
    """It comes after a request in the same sentence: "Write a letter, no emojis please"."""
    undoes: frozenset[str] = frozenset()
    """As in a `Wish`."""


class LatePatterns(dict[str, re.Pattern[str]]):
    """The entries of a language's `[wishes]` that are one pattern. Each is compiled at its first use."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        super().__init__()
        self._table = table

    def __missing__(self, name: str) -> re.Pattern[str]:
        return self.setdefault(name, re.compile(expand(self._table["wishes"][name], self._table)))


class WishGrammar:
    """How wishes are phrased in one language. Most of it is compiled when a text is read that may be in it."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        """`table`: a phrase file that has `[wishes]`."""
        self._table = table
        self.script = SCRIPTS[table["script"]]
        self.small_words = word_list(table, "small_words")
        #: Words that say nothing about the topic of a wish.
        self.topic_noise = self.small_words | word_list(table, "words_of_asking")
        self.patterns = LatePatterns(table)

    @cached_property
    def wishes(self) -> Mapping[str, Sequence[re.Pattern[str]]]:
        """Lists of clauses that are wishes."""
        given = self._table["wishes"]
        return {name: list(map(self._compiled, given[name])) for name in ("wishes", "standing_wishes", "after_wish")}

    @cached_property
    def rewritten(self) -> Sequence[tuple[re.Pattern[str], str, bool]]:
        given = self._table["wishes"]["rewritten"]
        return [(self._compiled(one["when"]), one["say"], one.get("undoes", False)) for one in given]

    @cached_property
    def about_user(self) -> Sequence[tuple[re.Pattern[str], str]]:
        return [(self._compiled(one["when"]), one["say"]) for one in self._table["wishes"]["about_user"]]

    @cached_property
    def topics(self) -> Sequence[tuple[re.Pattern[str], str]]:
        return [(self._compiled(one["when"]), one["name"]) for one in self._table["wishes"]["topics"]]

    def _compiled(self, phrase: str) -> re.Pattern[str]:
        return re.compile(expand(phrase, self._table))

    def compile(self) -> None:
        """Compile everything now."""
        _ = self.wishes, self.rewritten, self.about_user, self.topics
        for name, value in self._table["wishes"].items():
            if isinstance(value, str):
                _ = self.patterns[name]

    def topic(self, normalised: str) -> str:
        """What a normalised clause is about: a named topic, or its first content words."""
        named = next((name for when, name in self.topics if when.search(normalised)), None)
        return named or " ".join(self.content(normalised)[:_MOST_TOPIC_WORDS]) or "other"

    def content(self, normalised: str) -> list[str]:
        """The words of a normalised clause that say what it is about."""
        return [word for word in _LETTERS.findall(normalised) if word not in self.topic_noise]


def read_wishes(text: str, request: str = "", response: str = "") -> list[Wish]:
    """The wishes in a user's message, at most one for each topic.

    `request` and `response` are the turn before the message, if there was one. A message that repeats the request with
    a wish complains about the answer. If the request asked for a text or a program, wishes about form are about that.
    """
    if is_unsafe(text):
        return []
    words = without_code(shorten(text)).strip()
    addition = without_request(words, request)
    message = read_message(without_material(addition or words))
    reading = read_user(request, response, text)
    about_document = any(one.patterns["document"].search(normalise(shorten(request))) for one in all_grammars())
    about_this_answer = is_follow_up(message)
    wishes: list[Wish] = []
    for found in form_wishes_of(complaint(message, reading, words, addition), response):
        conditional = about_document or about_this_answer
        add_wish(wishes, found, lasts(found, message.words, bool(addition), conditional))
    topics = {wish.topic.partition("/")[0] for wish in wishes}
    asked = False
    for sentence in message.sentences:
        in_sentence = list(read_sentence_wishes(sentence, message, bool(wishes)))
        asks_too = bool(in_sentence) and not addition and asks_after_colon(sentence, message)
        for found in in_sentence:
            personal = found.topic in _PERSONAL
            if reading.kind in _CONTENT and not (found.standing or personal):
                continue
            after_request = found.conditional and reading.kind not in _COMPLAINTS
            conditional = after_request or ((asked or asks_too) and not personal)
            about_text = about_document and found.topic != "address"
            lasting = lasts(found, sentence.normalised, bool(addition), conditional or about_text or about_this_answer)
            # A plain instruction says it better than the user's words.
            if found.topic.partition("/")[0] not in topics:
                add_wish(wishes, found, lasting)
        asked = asked or (not addition and not in_sentence and begins_something_new(sentence, message.lexicon))
    return wishes if len(wishes) <= MOST_WISHES else []


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
    wishes = () if content or ends_with_question(response) else read_wishes(text, request, response)
    instructions = [wish.instruction for wish in wishes if wish.lasting and wish.topic != "address"]
    return Reading(ReplyKind.CHANGE_REQUEST, " ".join(instructions)) if instructions else Reading(ReplyKind.UNCLEAR)


def is_unsafe(text: str) -> bool:
    """Whether a message has tokens of chat templates, or tries to change whom the assistant or the judge obeys."""
    normalised = normalise(shorten(text))
    unsafe = any(grammar.patterns["unsafe"].search(normalised) for grammar in all_grammars())
    return unsafe or _TEMPLATE.search(text) is not None or is_for_a_judge(text)


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
    found = rewrite(words, grammar)
    if not found and any(pattern.fullmatch(normalised) for kind in kinds for pattern in grammar.wishes[kind]):
        found = make_wish(words, normalised, grammar)
    # Small models follow the plain instructions far more often than other words.
    form = form_wishes(words) if found else None
    return next(form_wishes_of(words)) if form and not form.says_more else found


def rewrite(words: str, grammar: WishGrammar) -> WishFound | None:
    """The wish that a clause becomes; None if the grammar does not rewrite it."""
    normalised = normalise_in_place(mask_quotations(words))
    for when, say, undoes in grammar.rewritten:
        if match := when.fullmatch(normalised):
            parts = [words[match.start(n) : match.end(n)] for n in range(1, match.re.groups + 1)]
            instruction = say.format(*map(lower_first, parts))
            found = make_wish(instruction, normalise(instruction), grammar)
            core = grammar.content(normalise(" ".join(parts))) if undoes else ()
            return found._replace(undoes=frozenset(core)) if found else None
    return None


def make_wish(words: str, normalised: str, grammar: WishGrammar) -> WishFound | None:
    """A wish in the user's words as a sentence; None if it is not plain text."""
    text = about_user(" ".join(words.split()), grammar)
    unseen = any(unicodedata.category(char) in _UNSEEN for char in text)
    if not text or len(text) >= MAX_CHARACTERS or _TEMPLATE.search(text) or unseen:
        return None
    stop = "\u3002" if "\u3400" <= text[-1] <= "\u9fff" else "."
    stop = "" if text[-1] in ".!?\u3002\uff01\uff1f" else stop
    return WishFound(text[0].upper() + text[1:] + stop, grammar.topic(normalised))


def about_user(words: str, grammar: WishGrammar) -> str:
    """A wish with "the user" in place of its speaker, whom the model would take for itself."""
    for when, say in grammar.about_user:
        said = normalise_in_place(mask_quotations(words))
        for match in reversed(list(when.finditer(said))):
            groups = (words[match.start(n) : match.end(n)] for n in range(1, match.re.groups + 1))
            words = words[: match.start()] + say.format(*groups) + words[match.end() :]
    return words


def strip_courtesy(words: str, grammar: WishGrammar) -> str:
    """A clause without courtesy and introductions before and after it."""
    words = trim(words)
    for _ in range(_MOST_STRIPPED):
        normalised = normalise_in_place(mask_quotations(words))
        if (lead := grammar.patterns["lead"].match(normalised)) and lead.end() < len(words):
            words = trim(words[lead.end() :])
        elif (tail := grammar.patterns["tail"].search(normalised)) and tail.start() > 0:
            words = trim(words[: tail.start()])
        else:
            break
    return words


def trim(words: str) -> str:
    """A clause without marks around it. A quotation at its end stays whole."""
    trimmed = words.strip(_EDGES)
    return f'{trimmed}"' if trimmed.count('"') % 2 and words.rstrip(_ENDS)[-1:] == '"' else trimmed


def lower_first(words: str) -> str:
    """A part of a clause with a small first letter, unless it is a name or an abbreviation."""
    first, _, rest = words.partition(" ")
    return words[:1].lower() + words[1:] if normalise(first) in all_small_words() and rest else words


def asks_after_colon(sentence: Sentence, message: Message) -> bool:
    """Whether a sentence with a wish asks for something new after it: "In one word: is Paris in France?"."""
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


def grammars_for(normalised: str) -> list[WishGrammar]:
    """The languages that a normalised text may be in, the likeliest first."""
    words = _WORD.findall(normalised)
    hits = [
        (sum(word in grammar.small_words for word in words), grammar)
        for grammar in all_grammars()
        if grammar.script.search(normalised)
    ]
    most = max((count for count, _ in hits), default=0)
    likely = [pair for pair in hits if most < _FEW_SMALL_WORDS or pair[0] >= 0.6 * most]
    return [grammar for _, grammar in sorted(likely, key=lambda pair: -pair[0])]


@cache
def all_grammars() -> tuple[WishGrammar, ...]:
    """The grammar of each phrase file that has one."""
    return tuple(WishGrammar(table) for table in tables() if "wishes" in table)
