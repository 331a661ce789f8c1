"""Says what a user wants as a plain instruction that stands alone.

A hint is a user's message without greetings and thanks, or an instruction about form. A teacher reads it beside the
request. It follows "Answer in one short sentence only." far more often than "shorter pls", above all if it is a small
model. The `[[instructions]]` of each phrase file have: `when` (phrases), `say` (the instruction), `to_short` and
`to_structured` (instructions for an answer that is already short, or has lists or code), `stronger` (the instruction if
the first one did not help), `complaint` (the phrases say what was wrong, not what is wished), and `about` (only the
first match per matter counts).

A wish is restated: "You forgot the sources again." becomes "Include the sources." The rules are those
of the phrase files: `rewritten` of `[wishes]` for clauses, and of `[weighed]` for sentences. A sentence that no rule
fits stays in the user's words. One that needs words which are not there ("Add one.") becomes no instruction.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from typing import Any, NamedTuple

from openclaw_rl.judge.rules.clauses import (
    DESIRE,
    DIRECTIVE,
    ENDS,
    NAMED,
    NONE,
    Core,
    clause_spans,
    core_of,
    resolve_in,
    without_courtesy,
)
from openclaw_rl.judge.rules.grammar import Rewriting, Scale, WeighedSentence, WishGrammar, quotes
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
    sentence_spans,
    tables,
    word_list,
)

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
#: Characters of an instruction. A longer one is a text, not a wish.
MAX_CHARACTERS = 200
#: Tokens of chat templates. A message that has them is no plain wish.
TEMPLATE = re.compile(
    r"<\|[^>\n]{0,40}\|?>|<</?SYS>>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>|<\uff5c|\{\{|\{%|</?(?:system|user|assistant|think)>",
    re.IGNORECASE,
)
#: Categories of characters that an instruction does not have: control characters and others that cannot be seen.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
#: What ends the first clause of a sentence.
_CLAUSE = re.compile(r",| so ")
#: Between a reason and what follows from it.
_FOLLOWS = re.compile(r"\bso\b\s*$|so\b")
#: "No summary."
_NONE = re.compile(r"(?:and )?no\b")
#: A word that is no name.
_PLURAL = re.compile(r"[A-Z][a-z]{2,}(?<![siu])s")
#: How an answer addresses somebody: "Hi Sam!", "Sure, Sam."
_ADDRESSED = re.compile(
    r"\b(?:[Hh]i|[Hh]ey|[Hh]ello|[Dd]ear|[Ss]ure|[Oo]kay|[Tt]hanks|[Ss]orry|[Mm]orning|thing|one)[ ,]+(\w+)[,.!]"
    r"|(?:^|[,.!?] )([A-Z]\w+)[,!]"
)


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


def said_wish(
    stated: Sequence[WeighedSentence], words: str, response: str, grammar: WishGrammar, beside: bool = False
) -> Iterator[WishFound]:
    """The wish of a message: the sentences that state it, as many as an instruction may have.

    `beside`: there is another wish in the message, so background is none.

    None if sentences that state it better than the others cannot stand alone: what is left would say something else.
    """
    assert grammar.scale
    patterns = grammar.scale.patterns
    stated = [one for one in stated if not patterns["task"].search(one.normalised)]
    adds = [one for one in stated if grammar.scale.patterns["adds"].search(one.normalised)]
    # "No summary. Add one." forbids none.
    stated = [one for one in stated if not (_NONE.match(one.normalised) and any(other is not one for other in adds))]
    addressed = is_addressed(words, response) or bool(grammar.scale.patterns["names"].search(normalise(words)))
    said: list[Restated] = []
    for one in stated:
        earlier = [words[start:end] for start, end in sentence_spans(words[: one.start])]
        said.append(restate_core(one, words, earlier[-1] if earlier else "", response, grammar, addressed))
    surest = min(max((one.surely for one in said if one.found and not one.dangling), default=NONE), DESIRE)
    chosen = choose(said, surest)
    if not any(one.names for one in chosen):
        # "Jump straight in." says nothing without "Long intros waste my time."
        chosen = [one for one in said if one.found and (one in chosen or (one.names and not one.dangling))]
    if not any(one.tells for one in chosen):
        chosen, surest = choose(said, NONE), NONE
    chosen = chosen if any(one.tells for one in chosen) else []
    missed = max((one.weight for one in said if not one.found or (one.dangling and one not in chosen)), default=0.0)
    lost = surest == NONE and all(one.weight < missed / 2 for one in chosen)
    chosen = [one for one in chosen if not beside or one.surely > DESIRE]
    if lost or not chosen:
        return
    while sum(len(one.found.instruction) + 1 for one in chosen if one.found) > MAX_CHARACTERS:
        chosen.remove(min(chosen, key=lambda one: one.weight))
    if best := max(chosen, key=lambda one: one.weight).found:
        instructions = dict.fromkeys(one.found.instruction for one in chosen if one.found)
        yield best._replace(instruction=" ".join(instructions))


def choose(said: Sequence["Restated"], surest: int) -> list["Restated"]:
    """The sentences that state a wish as surely as they may, with those that they need."""
    chosen: list[Restated] = []
    for one, after in zip_longest(said, said[1:]):
        needed = after is not None and after.dangling and after.surely >= surest
        if one.found and (one.surely >= surest or needed) and (not one.dangling or (chosen and one.tells)):
            chosen.append(one)
    return chosen


class Restated(NamedTuple):
    """What became of a sentence."""

    found: WishFound | None
    weight: float
    surely: int
    """How surely it states a wish."""
    dangling: bool
    """It needs words that are not there."""
    tells: bool
    """It says what to do, or what the user is."""
    names: bool
    """It names something that answers are made of."""


def restate_core(
    one: WeighedSentence, words: str, earlier: str, response: str, grammar: WishGrammar, addressed: bool
) -> Restated:
    """A sentence as an instruction without reasons and background. Its pronouns are resolved if they can be."""
    assert grammar.scale
    patterns = grammar.scale.patterns
    sentence = words[one.start : one.end]
    core = core_of(sentence, patterns)
    if core.surely == NONE:
        core = rewritten_clause(sentence, grammar, addressed) or core
    elif core.before and patterns["names"].search(one.normalised):
        # "My name's Theo, use it when you talk to me."
        whole = restate(sentence, response, grammar, addressed)
        core = Core(sentence, core.surely, "") if whole and whole.topic == "address" else core
    found, dangling = restate_alone(core.words, response, grammar, addressed)
    if (dangling or core.before) and (resolved := resolve_in(core, earlier, patterns)):
        found, dangling = restate_alone(resolved, response, grammar, addressed)
    if dangling and core.before:
        found = restate(sentence, response, grammar, addressed)
        dangling = found is not None and dangles(found.instruction, grammar)
    surely = core.surely
    if found and surely < DESIRE and patterns["imperative"].match(normalise(found.instruction)):
        surely = NAMED if found.topic == "address" else DESIRE
    told = found is not None and (surely == DIRECTIVE or tells(found, grammar))
    named = one.normalised + (f" {normalise(found.instruction)}" if found else "")
    names = patterns["shape_word"].search(named) is not None
    return Restated(found, one.weight, surely, dangling, told, names)


def rewritten_clause(sentence: str, grammar: WishGrammar, addressed: bool) -> Core | None:
    """The clause of a sentence that a rule rewrites: "The recap is wasted on me, I've just read it."."""
    assert grammar.scale
    spans = clause_spans(sentence, grammar.scale.patterns)
    whole = rewrite(tidy(sentence, grammar.scale), grammar, grammar.scale.rewritten, addressed)
    for start, end in spans if len(spans) > 1 and not whole else ():
        if _FOLLOWS.search(sentence[:start]) or _FOLLOWS.match(sentence[start:].lstrip()):
            # "I'm stuck with Python 2, so anything newer is useless." The reason says more.
            return None
        others = f"{sentence[:start]} {sentence[end:]}"
        if grammar.scale.patterns["example"].search(normalise(mask_quotations(others))):
            return None
        clause = tidy(sentence[start:end], grammar.scale)
        found = rewrite(clause, grammar, grammar.scale.rewritten, addressed)
        if found and not dangles(found.instruction, grammar):
            return Core(clause, NAMED, "")
    return None


def restate_alone(words: str, response: str, grammar: WishGrammar, addressed: bool) -> tuple[WishFound | None, bool]:
    """Words as an instruction, and whether it needs words that are not there."""
    assert grammar.scale
    found = restate(words, response, grammar, addressed)
    return found, found is not None and (needs_more(found.instruction, grammar) or dangles(found.instruction, grammar))


def needs_more(words: str, grammar: WishGrammar) -> bool:
    """Whether words say nothing without those before them: "act accordingly"."""
    assert grammar.scale
    return grammar.scale.patterns["needs"].search(normalise(mask_quotations(words)).strip()) is not None


def restate(sentence: str, response: str, grammar: WishGrammar, addressed: bool = False) -> WishFound | None:
    """A sentence that states a wish, as an instruction: by a rule, or in its own words if they can stand alone."""
    assert grammar.scale
    words = tidy(sentence, grammar.scale)
    normalised = normalise_in_place(mask_quotations(words))
    if quotes(words, response) and not normalised.strip("_ .!?,"):
        return make_wish(grammar.scale.not_said.format(words.rstrip(" .")), normalise(words), grammar)
    found = rewrite(words, grammar, grammar.scale.rewritten, addressed)
    fit = _LETTERS.search(normalised) and not grammar.scale.patterns["unfit"].search(normalised)
    return found or (make_wish(words, normalised, grammar) if fit else None)


def tidy(sentence: str, scale: Scale) -> str:
    """A sentence without courtesy, reminders and final marks. A question mark stays."""
    words = without_courtesy(" ".join(sentence.split()), scale.patterns)
    return words.strip(ENDS) if '"' not in words[-2:] else words.strip(" ")


def dangles(instruction: str, grammar: WishGrammar) -> bool:
    """Whether an instruction needs words that are not there: "Add one.", "Do it that way."."""
    assert grammar.scale
    said = normalise(mask_quotations(instruction)).replace("the user", "user")
    match = grammar.scale.patterns["dangles"].search(said)
    return match is not None and not grammar.scale.patterns["named"].search(said[: match.end()])


def tells(found: WishFound, grammar: WishGrammar) -> bool:
    """Whether a sentence says what to do, or what the user is, and not only what was wrong."""
    assert grammar.scale
    said = normalise(mask_quotations(found.instruction))
    patterns = grammar.scale.patterns
    return bool(patterns["instructs"].search(said)) or not patterns["finite"].search(_CLAUSE.split(said)[0])


def rewrite(words: str, grammar: WishGrammar, rules: Sequence[Rewriting], addressed: bool = False) -> WishFound | None:
    """The wish that a clause becomes; None if no rule rewrites it."""
    normalised = normalise_in_place(mask_quotations(words))
    patterns = grammar.scale.patterns if grammar.scale else {}
    for rule in rules:
        if (match := rule.match(normalised, patterns)) and fits(rule, match, words, addressed):
            parts = [words[match.start(n) : match.end(n)] for n in range(1, match.re.groups + 1)]
            parts = [base_form(part, patterns) for part in parts] if "gerund" in rule.given else parts
            parts = parts if "capital" in rule.given else [lower_first(part, grammar) for part in parts]
            instruction = rule.say.format(*parts, whole=words)
            found = make_wish(instruction, normalise(instruction), grammar)
            core = grammar.content(normalise(" ".join(parts))) if "undoes" in rule.given else ()
            return found._replace(undoes=frozenset(core)) if found else None
    return None


def base_form(words: str, patterns: Mapping[str, re.Pattern[str]]) -> str:
    """Words that begin with a verb in "-ing" as an imperative: "sticking to French"."""
    first, _, rest = words.partition(" ")
    stem = first.removesuffix("ing")
    doubled = stem[-1:] == stem[-2:-1]
    forms = [stem, f"{stem}e", *[stem[:-1]] * doubled]
    known = next((form for form in forms if patterns["verb_word"].fullmatch(form.lower())), f"start {first}")
    return f"{known} {rest}"


def fits(rule: Rewriting, match: re.Match[str], words: str, addressed: bool) -> bool:
    """Whether what a rule asks for besides its pattern is there."""
    name = words[match.start(1) : match.end(1)] if match.re.groups else words
    named = "capital" not in rule.given or all(part[:1].isupper() for part in name.split())
    return named and ("addressed" not in rule.given or addressed)


def is_addressed(words: str, response: str) -> bool:
    """Whether an answer addresses the user by a word of a message."""
    names = {name.lower() for pair in _ADDRESSED.findall(response) for name in pair if name}
    return bool(names & set(re.findall(r"\w+", words.lower())))


def make_wish(words: str, normalised: str, grammar: WishGrammar) -> WishFound | None:
    """A wish in the user's words as a sentence; None if it is not plain text."""
    text = about_user(" ".join(words.split()), grammar)
    unseen = any(unicodedata.category(char) in _UNSEEN for char in text)
    if not text or len(text) >= MAX_CHARACTERS or TEMPLATE.search(text) or unseen:
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


def lower_first(words: str, grammar: WishGrammar) -> str:
    """A part of a clause with a small first letter, unless it is a name or an abbreviation."""
    first, _, rest = words.partition(" ")
    small = (normalise(first) in grammar.topic_noise and rest) or _PLURAL.fullmatch(first)
    return words[:1].lower() + words[1:] if small else words
