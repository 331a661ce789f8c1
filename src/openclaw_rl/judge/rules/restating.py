"""Says a wish as an instruction that stands alone: "You forgot the sources again." becomes "Include the sources."

The rules are those of the phrase files: `rewritten` of `[wishes]` for clauses, and of `[weighed]` for sentences. A
sentence that no rule fits stays in the user's words. One that needs words which are not there ("Add one.") becomes no
instruction.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from openclaw_rl.judge.rules.grammar import Rewriting, Scale, WeighedSentence, WishGrammar, quotes
from openclaw_rl.judge.rules.instructions import (
    DESIRE,
    DIRECTIVE,
    ENDS,
    NAMED,
    NONE,
    Core,
    clause_spans,
    core_of,
    plain,
    resolve_in,
    without_courtesy,
)
from openclaw_rl.judge.rules.phrases import mask_quotations, normalise, normalise_in_place, sentence_spans

_LETTERS = re.compile(r"[^\W\d_]+")
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
_IRREGULAR = {"have": "has", "do": "does", "be": "is", "am": "is", "are": "is", "were": "was"}
#: How an answer addresses somebody: "Hi Sam!", "Sure, Sam."
_ADDRESSED = re.compile(
    r"\b(?:[Hh]i|[Hh]ey|[Hh]ello|[Dd]ear|[Ss]ure|[Oo]kay|[Tt]hanks|[Ss]orry|[Mm]orning|thing|one)[ ,]+(\w+)[,.!]"
    r"|(?:^|[,.!?] )([A-Z]\w+)[,!]"
)


#: Words of a sentence that may be a mere exclamation are fewer.
_FEW_WORDS = 3


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
    said = [one for one in said if addressed or not exclaims(one, grammar)] or said
    surest = min(max((one.surely for one in said if one.found and not one.dangling), default=NONE), DESIRE)
    chosen = choose(said, surest)
    if not any(one.names for one in chosen):
        # "Jump straight in." says nothing without "Long intros waste my time."
        chosen = [one for one in said if one.found and (one in chosen or (one.names and not one.dangling))]
    if not any(one.tells for one in chosen):
        chosen, surest = [one for one in choose(said, NONE) if one.tells], NONE
    chosen = chosen if any(one.tells for one in chosen) else []
    missed = [one.weight for one in said if not one.found or (one.dangling and one not in chosen)]
    lost = surest == NONE and bool(missed) and all(one.weight < max(missed) / 2 for one in chosen)
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


def exclaims(one: "Restated", grammar: WishGrammar) -> bool:
    """Whether a sentence is a word or two that name nothing: "Handy!", "Boring name."."""
    found = one.found
    few = found is not None and len(found.instruction.split()) < _FEW_WORDS and found.topic not in grammar.topic_names
    return few and not one.names and one.surely < NAMED


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
    if patterns["tale"].search(plain(core.words)):
        return Restated(None, one.weight, NONE, False, False, False)
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
        # "My kitchen has one pot, so plan around that." says what it refers to.
        fact = patterns["about_speaker"].search(normalise(core.before)) and not dangles(core.before, grammar)
        dangling = found is not None and not fact and dangles(found.instruction, grammar)
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
            groups = (SaidWords(words[match.start(n) : match.end(n)]) for n in range(1, match.re.groups + 1))
            words = words[: match.start()] + say.format(*groups) + words[match.end() :]
    return words


class SaidWords(str):
    """Words of a message. In the format `s` a verb gets the form that follows "the user": has, does, tries, wishes."""

    def __format__(self, given: str) -> str:
        if given != "s":
            return super().__format__(given)
        if (verb := self.lower()) in _IRREGULAR:
            return _IRREGULAR[verb]
        if re.search(r"[^aeiou]y$", verb):
            return f"{self[:-1]}ies"
        return f"{self}es" if re.search(r"(?:[sxz]|sh|ch|o)$", verb) else f"{self}s"


def lower_first(words: str, grammar: WishGrammar) -> str:
    """A part of a clause with a small first letter, unless it is a name or an abbreviation."""
    first, _, rest = words.partition(" ")
    small = (normalise(first) in grammar.topic_noise and rest) or _PLURAL.fullmatch(first)
    return words[:1].lower() + words[1:] if small else words
