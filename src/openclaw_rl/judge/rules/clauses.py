"""Finds the clauses of a sentence that state a wish, and what its pronouns stand for.

"My notes app wants Markdown, so send all replies as Markdown." Only the second clause is the wish; the first is its
reason. Reasons, background, complaints and chat beside a wish make a worse instruction. The patterns are those of
`[weighed]`:

- clause_end: what is between clauses
- imperative, directive, request: a clause that says what to do; desire: what the user likes, which may also be a reason
- noun_wish (`NAMED`): a clause without a verb that names what is wished; predicate: what a clause with a verb has
- insists: a word that makes a wish of a clause without a verb; chat: a clause that says nothing
- contrast: a clause that belongs to the one before it and makes it a wish ("never 'hrs'")
- fact: what the user is, which stays with a wish that follows from it ("I'm on Linux, so …")
- attached: a clause that belongs to the one beside it ("when you write code"), as one without a verb also does
- needs: a clause that says nothing without the words before it ("act accordingly")
- pronoun: words of a wish that stand for words before it; antecedent: what they may stand for
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from openclaw_rl.judge.rules.phrases import mask_quotations, normalise_in_place

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
        if patterns["contrast"].match(plain(sentence[slice(*spans[n])])):
            kinds[n - 1] = kinds[n] = DIRECTIVE
        elif kinds[n] == NAMED and kinds[n - 1] == DESIRE:
            kinds[n] = ATTACHED
        elif kinds[n] == DIRECTIVE and kinds[n - 1] == NONE and is_reason(sentence, spans[n - 1], spans[n], patterns):
            kinds[n - 1] = ATTACHED
    surest = max(kinds, default=NONE)
    if surest == ATTACHED and patterns["insists"].search(normalise_in_place(sentence)):
        return Core(sentence, NAMED, "")
    if surest <= ATTACHED:
        return Core(sentence, NONE, "")
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
    if patterns["predicate"].search(said):
        return NONE
    return NAMED if patterns["noun_wish"].search(whole) else ATTACHED


def plain(words: str) -> str:
    """Normalised words without quotations and marks around them."""
    return normalise_in_place(mask_quotations(words)).strip(ENDS)


def without_courtesy(words: str, patterns: Patterns) -> str:
    """A sentence without greetings, thanks and the like at its beginning and end."""
    while match := patterns["courtesy"].search(normalise_in_place(mask_quotations(words))):
        if match.start() == 0 and match.end() == len(words):
            break
        words = (words[: match.start()] + words[match.end() :]).strip()
    return words


def resolve(words: str, before: str, patterns: Patterns) -> str:
    """A wish with the words that its pronoun stands for; empty if it has none, or if they are not sure."""
    pronoun = patterns["pronoun"].search(normalise_in_place(mask_quotations(words)))
    spans = clause_spans(before, patterns)
    if not pronoun or not spans or not pronoun.lastindex:
        return ""
    clause = without_courtesy(sentence_part(before, spans[-1]), patterns)
    found = patterns["antecedent"].match(normalise_in_place(mask_quotations(clause)))
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
