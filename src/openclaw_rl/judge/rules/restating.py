"""Says a wish as an instruction that stands alone: "You forgot the sources again." becomes "Include the sources."

The rules are those of the phrase files: `rewritten` of `[wishes]` for clauses, and of `[weighed]` for sentences. A
sentence that no rule fits, or that needs words which are not there ("Add one."), becomes no instruction.
"""

import re
import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from openclaw_rl.judge.rules.grammar import WishGrammar
from openclaw_rl.judge.rules.text import mask_quotations, normalise, normalise_in_place
from openclaw_rl.judge.rules.weighing import ENDS, Rewriting, Scale, WeighedSentence, quotes

#: Characters of an instruction. A longer one is a text, not a wish.
MAX_CHARACTERS = 200
#: Tokens of chat templates. A message that has them is no plain wish.
TEMPLATE = re.compile(
    r"<\|[^>\n]{0,40}\|?>|<</?SYS>>|\[/?INST\]|</?s>|<(?:start|end)_of_turn>|<\uff5c|\{\{|\{%|</?(?:system|user|assistant|think)>",
    re.IGNORECASE,
)
#: Categories of characters that an instruction does not have: control characters and others that cannot be seen.
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
#: Kinds of sentences that do not say what to do: what the user is, and parts of sentences.
_WEAK = frozenset({"fact", "part"})
#: A word that is no name.
_PLURAL = re.compile(r"[A-Z][a-z]{2,}(?<![siu])s")
#: How an answer addresses somebody: "Hi Sam!", "Sure, Sam."
_ADDRESSED = re.compile(
    r"\b(?:[Hh]i|[Hh]ey|[Hh]ello|[Dd]ear|[Ss]ure|[Oo]kay|[Tt]hanks|[Ss]orry|[Mm]orning|thing|one)[ ,]+(\w+)[,.!]"
    r"|(?:^|[,.!?] )([A-Z]\w+)[,!]"
)


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
    kind: str = ""
    """How it was said, as in a `Rewriting`."""


def said_wish(
    stated: Sequence[WeighedSentence], words: str, response: str, grammar: WishGrammar
) -> Iterator[WishFound]:
    """The wish of a message: the sentences that state it, as many as an instruction may have."""
    said: list[tuple[float, WishFound]] = []
    assert grammar.scale
    task = grammar.scale.patterns["task"]
    stated = [one for one in stated if not task.search(one.normalised)]
    before, lost, heaviest = "", False, max((one.weight for one in stated), default=0.0)
    addressed = is_addressed(words, response)
    for one in stated:
        sentence = words[one.start : one.end]
        both = restate_both(before, sentence, grammar)
        if both and said:
            said.pop()
        found = both or restate(sentence, response, grammar, addressed)
        if found and ((said and not lost) or not refers(found.instruction, grammar, lost)):
            said.append((one.weight, found))
        before, lost = sentence, not found
    # These say too little beside words that say more.
    if all(found.kind in _WEAK and weight < heaviest / 2 for weight, found in said):
        return
    while sum(len(found.instruction) + 1 for _, found in said) > MAX_CHARACTERS:
        said.remove(min(said, key=lambda one: one[0]))
    if said:
        _, best = max(said, key=lambda one: one[0])
        yield best._replace(instruction=" ".join(dict.fromkeys(found.instruction for _, found in said)))


def restate_both(before: str, sentence: str, grammar: WishGrammar) -> WishFound | None:
    """Two sentences as one instruction: "There's no summary. Add one." """
    assert grammar.scale
    if not before:
        return None
    first, second = (tidy(one, grammar.scale) for one in (before, sentence))
    pairs = [rule for rule in grammar.scale.rewritten if "pair" in rule.given]
    return rewrite(f"{first}{'' if first.endswith('?') else '.'} {second}", grammar, pairs)


def restate(sentence: str, response: str, grammar: WishGrammar, addressed: bool = False) -> WishFound | None:
    """A sentence that states a wish, as an instruction; None if no rule fits it or its clauses."""
    assert grammar.scale
    words = tidy(sentence, grammar.scale)
    if quotes(words, response) and not mask_quotations(words).strip("_ .!?,"):
        return make_wish(grammar.scale.not_said.format(words.rstrip(" .")), normalise(words), grammar)
    rules = [rule for rule in grammar.scale.rewritten if "pair" not in rule.given]
    if found := rewrite(words, grammar, rules, addressed):
        return found
    spans = grammar.scale.clauses(normalise_in_place(mask_quotations(words)))
    clauses = [rewrite(tidy(words[start:end], grammar.scale), grammar, rules, addressed) for start, end in spans]
    said: list[WishFound] = []
    for n, found in enumerate(clauses):
        lost = n > 0 and not clauses[n - 1]
        if found and ((said and not lost) or not refers(found.instruction, grammar, lost)):
            said.append(found)
    best = next((found for found in said if found.kind not in _WEAK), said[0] if said else None)
    if len(spans) == 1 or not best or (best.kind == "fact" and len(said) < len(spans)):
        return None
    return best._replace(instruction=" ".join(found.instruction for found in said))


def tidy(sentence: str, scale: Scale) -> str:
    """A sentence without courtesy, reminders and final marks. A question mark stays."""
    words = scale.without_courtesy(" ".join(sentence.split()))
    return words.strip(ENDS) if '"' not in words[-2:] else words.strip(" ")


def dangles(instruction: str, grammar: WishGrammar) -> bool:
    """Whether an instruction needs words that are not there: "Add one.", "Do it that way."."""
    assert grammar.scale
    said = normalise(mask_quotations(instruction)).replace("the user", "user")
    match = grammar.scale.patterns["dangles"].search(said)
    return match is not None and not grammar.scale.patterns["named"].search(said[: match.end()])


def refers(instruction: str, grammar: WishGrammar, lost: bool) -> bool:
    """Whether an instruction needs words before it. `lost`: there were some, which became no instruction."""
    assert grammar.scale
    pronoun = grammar.scale.patterns["refers"].search(normalise(mask_quotations(instruction)))
    return (lost and pronoun is not None) or dangles(instruction, grammar)


def rewrite(words: str, grammar: WishGrammar, rules: Sequence[Rewriting], addressed: bool = False) -> WishFound | None:
    """The wish that a clause becomes; None if no rule rewrites it."""
    normalised = normalise_in_place(mask_quotations(words))
    patterns = grammar.scale.patterns if grammar.scale else {}
    for rule in rules:
        if (match := rule.match(normalised, patterns)) and fits(rule, match, words, addressed):
            parts = [words[match.start(n) : match.end(n)] for n in range(1, match.re.groups + 1)]
            parts = parts if "capital" in rule.given else [lower_first(part, grammar) for part in parts]
            instruction = rule.say.format(*parts, whole=words)
            found = make_wish(instruction, normalise(instruction), grammar)
            core = grammar.content(normalise(" ".join(parts))) if "undoes" in rule.given else ()
            return found._replace(undoes=frozenset(core), kind=rule.kind) if found else None
    return None


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
