"""Says what a user wants as a plain instruction that stands alone.

A hint is a user's message without greetings and thanks, or an instruction about form. A teacher reads it beside the
request. It follows "Answer in one short sentence only." far more often than "shorter pls", above all if it is a small
model. The `[[instructions]]` of each phrase file have: `when` (phrases), `say` (the instruction), `to_short` and
`to_structured` (instructions for an answer that is already short, or has lists or code), `stronger` (the instruction if
the first one did not help), `complaint` (the phrases say what was wrong, not what is wished), and `about` (only the
first match per matter counts).

Of a sentence only some clauses state a wish. "My notes app wants Markdown, so send all replies as Markdown.": the first
is the reason of the second. Reasons, background, complaints and chat beside a wish make a worse instruction. The
patterns are those of `[weighed]`:

- clause_end: what is between clauses
- imperative, directive, request: a clause that says what to do; desire: what the user likes, which may also be a reason
- noun_wish (`NAMED`): a clause without a verb that names what is wished; predicate: what a clause with a verb has
- insists: a word that makes a wish of a clause without a verb; chat: a clause that says nothing
- contrast: a clause that belongs to the one before it and makes it a wish ("never 'hrs'")
- fact: what the user is, which stays with a wish that follows from it ("I'm on Linux, so …")
- attached: a clause that belongs to the one beside it ("when you write code"), as one without a verb also does
- while_answering: the end of a clause without a verb, which says when it holds
- tale: what others said or did
- unfinished: the end of words that lack what comes after them, though that may look like courtesy
- needs: a clause that says nothing without the words before it ("act accordingly")
- pronoun: words of a wish that stand for words before it; antecedent: what they may stand for
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from openclaw_rl.judge.rules.phrases import (
    SCRIPTS,
    Lexicon,
    Phrases,
    all_small_words,
    expand,
    lexicon_for,
    mask_quotations,
    normalise,
    normalise_in_place,
    read_phrases,
    tables,
    word_list,
)

Patterns = Mapping[str, re.Pattern[str]]

#: Marks around a sentence.
ENDS = " \t\n,;:.!\u2026-\u2013\u2014("
#: Clauses of a sentence that are read.
_MOST_CLAUSES = 8
#: The head of words that name several things, before "of" or "in".
_PLURAL = re.compile(
    r"(?:(?!(?:of|in|at|on|for|with|like)\b)[^ ]+ )*?[^ ]*[^s\W]s(?: (?:of|in|at|on|for|with|like)\b|$)"
)
#: The group of `antecedent` that is a quotation.
_QUOTED = 5
#: How surely a clause states a wish.
NONE, ATTACHED, DESIRE, NAMED, DIRECTIVE = range(5)
#: Characters of a hint.
MAX_HINT = 300
_SEPARATORS = " \t\n,.!?;:…-–—。、\uff0c\uff01\uff1f\uff1b\uff1a"
_SENTENCE_END = re.compile(r"[.!?。！？](?=\s|$)|[。！？]")
_LETTERS = re.compile(r"[^\W\d_]+")
_MOST_LEADS = 6
_MAX_BEFORE = 60
#: A hint with a number is more precise than any instruction.
_NUMBER = re.compile(
    r"\d|\b(?:two|three|four|five|ten|twenty|thirty|fifty|hundred|zehn|zwanzig|vingt|dix|diez|veinte)\b"
)
_WORD = re.compile(r"\w+")
#: An answer with at most this many words is short: two or three sentences.
SHORT_WORDS = 60
#: Structure that one paragraph of text would lose, in an answer or in a hint.
_STRUCTURE = re.compile(r"```|^\s*(?:[-*+•]|\d+[.)])\s|\b(?:list|bullets?|table|code)\b", re.MULTILINE | re.IGNORECASE)


def make_hint(words: str) -> str:
    """Clean a user's message. The result is empty only if the message has no words."""
    text = " ".join(words.split())[: 4 * MAX_HINT]
    lexicon = lexicon_for(normalise(text))
    text = strip_praise(text, lexicon)
    for _ in range(_MOST_LEADS):
        shorter = strip_lead(text, lexicon)
        if shorter == text or len(shorter) < 2:
            break
        text = shorter
    return cut(text)


def says_nothing(hint: str, lexicon: Lexicon) -> bool:
    """Whether a hint only asks for an answer, without saying what was wrong with the given one."""
    rest = lexicon.blank("bare", normalise(hint), by="")
    return rest != normalise(hint) and not set(_LETTERS.findall(rest)) - all_small_words()


def strip_praise(text: str, lexicon: Lexicon) -> str:
    """Remove praise or thanks before a "but"."""
    normalised = normalise_in_place(text[:_MAX_BEFORE])
    contrast = lexicon.find("contrast", normalised)
    if not contrast or not any(lexicon.has(signal, normalised[: contrast.start()]) for signal in ("praise", "thanks")):
        return text
    return text[contrast.end() :].lstrip(_SEPARATORS) or text


def strip_lead(text: str, lexicon: Lexicon) -> str:
    """Remove one greeting, thanks or filler from the beginning."""
    words = text.lstrip(_SEPARATORS)
    normalised = normalise_in_place(words[:_MAX_BEFORE])
    match = lexicon.find("lead", normalised)
    if not match or normalised[: match.start()].strip(_SEPARATORS) or not match.group():
        return words
    return words[match.end() :].lstrip(_SEPARATORS)


def cut(text: str) -> str:
    """Cut a long text at the end of a sentence, or of a word."""
    if len(text) <= MAX_HINT:
        return text
    head = text[:MAX_HINT]
    ends = [match.end() for match in _SENTENCE_END.finditer(head)]
    if ends and ends[-1] > MAX_HINT // 3:
        return head[: ends[-1]]
    return head.rsplit(" ", 1)[0].rstrip(",;: ") + " …"


class FormInstruction(NamedTuple):
    """An instruction about form."""

    text: str
    stronger: str = ""
    """The instruction for somebody who wishes the same again, if it is another one."""


class AnswerForm(NamedTuple):
    """The form of the answer that a hint is about."""

    short: bool
    structured: bool


class FormRule(NamedTuple):
    """Phrases, and the instruction that replaces them."""

    when: Phrases
    given: Mapping[str, Any]
    """The table of the phrase file."""

    def instruction(self, answer: AnswerForm) -> FormInstruction:
        say, to_short, to_structured = (self.given.get(key, "") for key in ("say", "to_short", "to_structured"))
        if answer.short and to_short:
            return FormInstruction(to_short)
        if answer.structured and to_structured:
            return FormInstruction(to_structured, say)
        return FormInstruction(say, self.given.get("stronger", to_short))


class FormWishes(NamedTuple):
    """The wishes about form that one language finds in a text."""

    instructions: Mapping[str, FormInstruction]
    """By matter."""
    familiar: int
    """How many words of the text are small words of the language."""
    says_more: bool
    """Whether the text says anything else."""


@dataclass(frozen=True, slots=True)
class FormRules:
    """The instructions of one language."""

    script: re.Pattern[str]
    denial: re.Pattern[str] | None
    """Words that negate a wish after them. They change nothing before a complaint."""
    small_words: frozenset[str]
    words_of_asking: frozenset[str]
    """Words that only introduce a wish."""
    rules: tuple[FormRule, ...]

    def read(self, text: str, answer: AnswerForm) -> FormWishes:
        """The wishes in a normalised text: at most one instruction per matter."""
        instructions: dict[str, FormInstruction] = {}
        rest = text
        for rule in self.rules:
            match = rule.when.find(text)
            if not match or (not rule.given.get("complaint") and self._denies(text[: match.start()])):
                continue
            instructions.setdefault(rule.given["about"], rule.instruction(answer))
            rest = rest.replace(match.group(), " ")
        words = set(_WORD.findall(text)) & self.small_words
        more = set(_WORD.findall(rest)) - self.small_words - self.words_of_asking
        return FormWishes(instructions, len(words), bool(more))

    def _denies(self, before: str) -> bool:
        return bool(self.denial and self.denial.search(before))


def instruct(hint: str, response: str = "") -> str:
    """A hint with an instruction for its wishes about form. If it says nothing else, the instruction replaces it.

    The instruction depends on the `response`: one that is already short must become shorter, and one with lists keeps
    them.
    """
    wishes = form_wishes(hint, response)
    if not wishes:
        return hint
    # Two matters may have the same instruction.
    say = " ".join(dict.fromkeys(one.text for one in wishes.instructions.values()))
    stop = "." if hint[-1:].isalnum() else ""
    return f"{hint}{stop} {say}" if wishes.says_more else say


def form_wishes(hint: str, response: str = "") -> FormWishes | None:
    """The wishes about form in a hint; None if there are none, or if it has a number, which says it better."""
    text = normalise(hint)
    if _NUMBER.search(text):
        return None
    short = bool(response) and len(_WORD.findall(response)) <= SHORT_WORDS
    answer = AnswerForm(short, bool(_STRUCTURE.search(response) or _STRUCTURE.search(text)))
    read = (language.read(text, answer) for language in all_form_rules() if language.script.search(text))
    return max(
        (wishes for wishes in read if wishes.instructions),
        key=lambda wishes: (len(wishes.instructions), wishes.familiar),
        default=None,
    )


@cache
def all_form_rules() -> tuple[FormRules, ...]:
    """The instructions of each phrase file that has any."""
    return tuple(read_form_rules(table) for table in tables() if "instructions" in table)


def read_form_rules(table: dict[str, Any]) -> FormRules:
    """Read the instructions of one phrase file."""
    rules = tuple(
        FormRule(read_phrases([expand(phrase, table) for phrase in one["when"]], table), one)
        for one in table["instructions"]
    )
    denial = re.compile(rf"\b{table['denial']}") if "denial" in table else None
    small_words = word_list(table, "small_words")
    return FormRules(SCRIPTS[table["script"]], denial, small_words, word_list(table, "words_of_asking"), rules)


class Core(NamedTuple):
    """The clauses of a sentence that state its wish."""

    words: str
    surely: int
    """The surest of its clauses; `NONE` if none states a wish, and then the words are those of the whole sentence."""
    before: str
    """The words of the sentence before them."""


def core_of(sentence: str, patterns: Patterns) -> Core:
    """The clauses of a sentence that state its wish, with those that belong to them."""
    spans = clause_spans(sentence, patterns)
    kinds = [kind_of(sentence[start:end], patterns) for start, end in spans]
    for n in range(1, len(kinds)):
        if kinds[n - 1] == NAMED and sentence[spans[n - 1][1] : spans[n][0]].strip() == ":":
            # "Stories for my daughter: nobody dies."
            kinds[n - 1] = ATTACHED
        if patterns["contrast"].match(plain(sentence[slice(*spans[n])])):
            kinds[n - 1] = kinds[n] = DIRECTIVE
        elif kinds[n] == NAMED and kinds[n - 1] == DESIRE:
            kinds[n] = ATTACHED
        elif kinds[n] == DIRECTIVE and kinds[n - 1] == NONE and is_reason(sentence, spans[n - 1], spans[n], patterns):
            kinds[n - 1] = ATTACHED
    surest = max(kinds, default=NONE)
    if surest == ATTACHED:
        ends = [*(start for start, _ in spans[1:]), len(sentence)]
        said = [normalise_in_place(sentence[start:end]) for (start, _), end in zip(spans, ends, strict=True)]
        kinds = [
            NAMED if kind and patterns["insists"].search(one) else kind for kind, one in zip(kinds, said, strict=True)
        ]
        surest = max(kinds)
    if surest <= ATTACHED:
        return Core(sentence[spans[0][0] :] if spans else sentence, NONE, "")
    kept = [kind >= min(surest, NAMED) for kind in kinds]
    for n, kind in enumerate(kinds):
        kept[n] = kept[n] or (kind == ATTACHED and n > 0 and kept[n - 1])
    for n in range(len(kinds) - 2, -1, -1):
        kept[n] = kept[n] or (kinds[n] == ATTACHED and kept[n + 1])
    text, last = "", 0
    for n in (n for n, keep in enumerate(kept) if keep):
        between = sentence[last : spans[n][0]] if kept[n - 1] else ". "
        joined = "" if not text else ", " if re.search(r"\w{3}", between) else between
        text, last = text + joined + sentence[spans[n][0] : spans[n][1]], spans[n][1]
    rest = sentence[last:] if sentence[last:].strip() in (".", "!", "?", "...") else ""
    first = kept.index(True)
    return Core(text + rest, surest, sentence[: spans[first - 1][1]] if first else "")


def is_reason(sentence: str, span: tuple[int, int], following: tuple[int, int], patterns: Patterns) -> bool:
    """Whether a clause says what the user is, and the next one what follows from it."""
    follows = re.search(r"\bso\b", sentence[span[1] : following[0]], re.IGNORECASE)
    return follows is not None and patterns["fact"].match(plain(sentence[slice(*span)])) is not None


def clause_spans(sentence: str, patterns: Patterns) -> list[tuple[int, int]]:
    """The start and end of each clause."""
    said = normalise_in_place(mask_quotations(sentence))
    ends = [match.span() for match in patterns["clause_end"].finditer(said)]
    ends = ends[: _MOST_CLAUSES - 1]
    spans = zip([0, *(end for _, end in ends)], [*(start for start, _ in ends), len(sentence)], strict=True)
    return [(start, end) for start, end in spans if not patterns["chat"].fullmatch(said[start:end].strip(ENDS))]


def kind_of(clause: str, patterns: Patterns) -> int:
    """How surely a clause states a wish."""
    whole, said = plain(clause), plain(without_courtesy(clause, patterns))
    if any(patterns[name].match(said) for name in ("imperative", "directive", "request")):
        return DIRECTIVE
    if patterns["desire"].match(said):
        return DESIRE
    if patterns["attached"].match(whole):
        return ATTACHED
    if patterns["predicate"].search(patterns["while_answering"].sub("", said)):
        return NONE
    return NAMED if patterns["noun_wish"].search(whole) else ATTACHED


def plain(words: str) -> str:
    """Normalised words without quotations and marks around them."""
    return normalise_in_place(mask_quotations(words)).strip(ENDS)


def without_courtesy(words: str, patterns: Patterns) -> str:
    """A sentence without greetings, thanks and the like at its beginning and end. What is left is no torn clause."""
    while match := patterns["courtesy"].search(normalise_in_place(mask_quotations(words))):
        if (match.start() == 0 and match.end() == len(words)) or tears(words[: match.start()], patterns):
            break
        words = (words[: match.start()] + words[match.end() :]).strip()
    return words


def tears(before: str, patterns: Patterns) -> bool:
    """Whether words lack what comes after them: "Never end with a" without "thank you"."""
    return patterns["unfinished"].search(normalise(before).strip(ENDS)) is not None


def resolve(words: str, before: str, patterns: Patterns) -> str:
    """A wish with the words that its pronoun stands for; empty if it has none, or if they are not sure."""
    pronoun = patterns["pronoun"].search(normalise_in_place(mask_quotations(words)))
    spans = clause_spans(before, patterns)
    if not pronoun or not spans or not pronoun.lastindex:
        return ""
    clauses = [without_courtesy(sentence_part(before, span), patterns) for span in reversed(spans)]
    tried = ((patterns["antecedent"].match(normalise_in_place(mask_quotations(one))), one) for one in clauses)
    found, clause = next((pair for pair in tried if pair[0]), (None, ""))
    if not found or not found.lastindex:
        return ""
    named = clause[found.start(found.lastindex) : found.end(found.lastindex)]
    start, end = pronoun.span(pronoun.lastindex)
    plural = _PLURAL.match(named.lower()) is not None
    if words[start:end].lower() != "one" and plural != (pronoun.lastindex == 1) and found.lastindex < _QUOTED:
        return ""
    named = named[:1].lower() + named[1:] if named[1:2].islower() else named
    return words[:start] + named + words[end:]


def resolve_in(core: Core, earlier: str, patterns: Patterns) -> str:
    """The words of a wish, resolved by the words of its sentence before it, or by the sentence before that."""
    return resolve(core.words, core.before, patterns) or resolve(core.words, earlier, patterns)


def sentence_part(sentence: str, span: tuple[int, int]) -> str:
    """A part of a sentence without marks around it."""
    return sentence[slice(*span)].strip(ENDS + "?")
