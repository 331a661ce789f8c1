"""How wishes are phrased in each language, and weighed.

The `[wishes]` tables of the phrase files say how they are phrased. All values are regular expressions over normalised
text, with the word groups of the file's `[words]`:

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

A `Scale` weighs whether a message states a wish for all answers, however it is phrased, and finds the sentences that
do. The `weights` file of the `[weighed]` table has a weight on each line, and the words, pairs of words ("a b") and
pairs with one word between them ("a * b") that have it; "^" and "$" are the ends of a sentence, "__" is a quotation,
"0" a number, and "=" is before a circumstance. "~" is before the kinds of two or three words: `VERB` for a verb of
wishes, `SHAPE` for what answers are made of, `WORD` for other words, and `small_words` for themselves. A message
states a wish if the weights of what it has add up to more than `LEAST`. Plain questions and quotations are not read.
`benchmarks/wish_weights.py` fits the weights.

- question, complaint, request, tag: sentences that ask; that complain by a question; that ask to do something; and
  words at the end of a sentence that do not make it a question
- misses: a sentence that misses a part of answers
- one_text: the message is about one text, not about all answers; standing: it is about more than one answer
- task: a sentence that asks for something new beside a wish
- shape_word: what answers are made of; generic, definite, about_speaker: words that make a standing wish likelier or
  less likely
- names: a message that says how its writer is called
- courtesy: words that are no part of the wish
- rewritten: how sentences become instructions; others stay in the user's words unless they are `unfit` to stand alone
- instructs: a message that becomes an instruction has a sentence with it, or one without a verb
- adds: words of a message in which "no summary" misses a summary and does not forbid it
- finite: words that a part without a verb does not have, up to `subordinate`
- refers: words that need the sentence before them; dangles: an instruction with them, unless words are `named` before
- not_said: the instruction for a sentence that only quotes the answer
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from itertools import chain, pairwise
from typing import Any, NamedTuple

from openclaw_rl.judge.rules.instructions import DESIRE, NONE, core_of
from openclaw_rl.judge.rules.phrases import (
    SCRIPTS,
    ends_with_question,
    expand,
    mask_quotations,
    normalise,
    normalise_in_place,
    sentence_spans,
    tables,
    word_list,
)

#: Words of a topic that no table names.
_MOST_TOPIC_WORDS = 3
#: With fewer small words of any language, all languages of the script are tried.
_FEW_SMALL_WORDS = 2
_LETTERS = re.compile(r"[^\W\d_]+")
_WORDS = re.compile(r"\w+")
#: The least sum of weights of a message that states a wish.
LEAST = 1.0
#: The same for a message that seems to be about one text, or what a question is about.
_LEAST_IF_DOUBTFUL = 2.5
#: The least sum of weights, without the bias, of a sentence that is part of the wish.
_LEAST_OF_SENTENCE = -2.5
#: Sentences at the beginning and at the end of a message that are read.
_FIRST, _LAST = 4, 2
#: Circumstances, and their patterns, that also weigh together with how surely the message states a wish.
_WEIGHED_WITH_SUREST = {
    "shape": "shape_word",
    "standing": "standing",
    "generic": "generic",
    "about_user": "about_speaker",
    "definite": "definite",
}
#: Characters of a sentence that are read.
_MAX_CHARACTERS = 300
_SPACES = re.compile(r"\s+")
_TOKEN = re.compile(r"[a-z']+|_{2,}|\d+|[?!:]")
#: Words whose kinds are remembered.
_MOST_WORDS = 4096
#: Words of a sentence that has few.
_FEW_WORDS = 5
_MASKED = re.compile(r"_{3,}")


class Rewriting(NamedTuple):
    """How words that are a wish become an instruction."""

    when: re.Pattern[str]
    say: str
    """The instruction, with the groups of `when`, or `whole` for all of the words."""
    given: frozenset[str]
    """What else must be there, and what follows from it: see `read_rewritings`."""

    def match(self, words: str, patterns: Mapping[str, re.Pattern[str]]) -> re.Match[str] | None:
        """The match of normalised words, if there are as few of them as there may be, and no verb where none may be."""
        match = self.when.fullmatch(words)
        if not match or ("few" in self.given and len(words.split()) > _FEW_WORDS):
            return None
        main = patterns["subordinate"].sub("", match.group(1)) if "noun" in self.given else ""
        return None if main and patterns["finite"].search(main) else match


def read_rewritings(table: Mapping[str, Any], given: Sequence[Mapping[str, Any]]) -> list[Rewriting]:
    """The rules of a `rewritten` table. Besides `when` and `say`, they have any of these.

    - undoes: the wish takes back an earlier one that has the words of the groups
    - few: only for few words; noun: the first group has no verb
    - capital: the first group begins with a capital letter
    - gerund: the first group begins with a verb in "-ing", which becomes an imperative
    - addressed: the answer before the message addresses somebody by a word of the message
    """
    flags = (frozenset(name for name, value in one.items() if value is True) for one in given)
    return [
        Rewriting(re.compile(expand(one["when"], table)), one["say"], having)
        for one, having in zip(given, flags, strict=True)
    ]


class WeighedSentence(NamedTuple):
    """A sentence of a message that is no plain question."""

    start: int
    end: int
    normalised: str
    weight: float
    """The sum of the weights of its words."""
    complains: bool
    """It is a question that complains."""


class Weighing(NamedTuple):
    """What the words of a message say."""

    score: float
    stated: Sequence[WeighedSentence]
    """The sentences that state the wish, in their order; empty if there is none."""
    standing: bool
    """It says that it is for more than one answer."""
    about_one_text: bool
    """The message is about a text, and says nothing about all answers."""
    only_asks: bool
    """All of it are plain questions, which are not weighed."""


class Scale:
    """How the words of one language weigh."""

    def __init__(self, table: Mapping[str, Any]) -> None:
        """`table`: a phrase file that has `[weighed]`."""
        self._table = table
        self._given = table["weighed"]
        self._small_words = word_list(table, "small_words") | word_list(self._given, "small_words")

    @cached_property
    def rewritten(self) -> Sequence[Rewriting]:
        return read_rewritings(self._table, self._given["rewritten"])

    @cached_property
    def patterns(self) -> Mapping[str, re.Pattern[str]]:
        plain = {name: one for name, one in self._given.items() if isinstance(one, str) and name != "weights"}
        return {name: re.compile(expand(phrase, self._table)) for name, phrase in plain.items()}

    @cached_property
    def weights(self) -> Mapping[str, float]:
        """The weights of words, pairs of words and circumstances."""
        file = files("openclaw_rl.judge.rules") / "languages" / self._given["weights"]
        lines = (line.split("\t") for line in file.read_text("utf-8").splitlines())
        return {one: float(weight) for weight, listed in lines for one in listed.split("|")}

    @property
    def not_said(self) -> str:
        return str(self._given["not_said"])

    def compile(self) -> None:
        """Compile everything now."""
        _ = self.rewritten, self.patterns, self.weights

    def weigh(self, words: str, response: str, about_document: bool) -> Weighing:
        """Weigh the user's own words in a message. `about_document`: the request was for a text or a program."""
        said, asks = self.read(words)
        score = self._sum(self.found(words, said, asks, response, about_document))
        plain = normalise(mask_quotations(words))
        standing = self.patterns["standing"].search(plain) is not None
        about_text = not standing and self.patterns["one_text"].search(plain) is not None
        # "We speak German at home. Is that bad?" is no wish, but what a question is about.
        doubtful = about_text or (asks and not standing and self._surest(words, said) <= DESIRE)
        stated = self.stated(said) if score > (_LEAST_IF_DOUBTFUL if doubtful else LEAST) and said else []
        return Weighing(score, stated, standing, about_text, not said)

    def read(self, words: str) -> tuple[list[WeighedSentence], bool]:
        """The sentences of a message that are no plain questions, and whether there are others."""
        masked = mask_quotations(words)
        spans = sentence_spans(words)
        if len(spans) > _FIRST + _LAST:
            spans = spans[:_FIRST] + spans[-_LAST:]
        said = []
        for start, end in spans:
            normalised = _SPACES.sub(" ", normalise_in_place(masked[start:end])).strip()[:_MAX_CHARACTERS]
            complains = self.patterns["complaint"].match(normalised) is not None
            if complains or not self._asks(normalised):
                weight = self._sum(self.parts_of(normalised))
                said.append(WeighedSentence(start, end, normalised, weight, complains))
        return said, len(said) < len(spans)

    def found(
        self, words: str, said: Sequence[WeighedSentence], asks: bool, response: str, about_document: bool
    ) -> set[str]:
        """The words, pairs of words and circumstances of a message."""
        circumstances = {
            "=bias": True,
            "=question": asks,
            "=no_words": not said,
            "=document": about_document,
            "=after_answer": bool(response) and not about_document,
            "=complaint": any(one.complains for one in said),
            "=misses": any(self.patterns["misses"].search(one.normalised) for one in said),
            "=quotes_answer": any(quotes(words[one.start : one.end], response) for one in said),
            "=answers_question": ends_with_question(response),
        }
        plain = " ".join(one.normalised for one in said)
        surest = self._surest(words, said)
        circumstances |= {f"=surest{surest}": True, f"=sentences{len(said)}": len(said) < _FIRST}
        circumstances["=task"] = any(self.patterns["task"].search(one.normalised) for one in said)
        circumstances["=one_text"] = self.patterns["one_text"].search(plain) is not None
        for name, pattern in _WEIGHED_WITH_SUREST.items():
            if self.patterns[pattern].search(plain):
                circumstances |= {f"={name}": name != "definite", f"={name}_surest{surest}": True}
                circumstances[f"={name}_document"] = about_document
        there = {name for name, holds in circumstances.items() if holds}
        return there.union(*(self.parts_of(one.normalised) for one in said))

    def stated(self, said: Sequence[WeighedSentence]) -> list[WeighedSentence]:
        """The sentences that state the wish, with those that they refer to."""
        best = max(one.weight for one in said)
        chosen = {n for n, one in enumerate(said) if one.weight >= min(best, _LEAST_OF_SENTENCE)}
        for n in sorted(chosen, reverse=True):
            if n and self.patterns["refers"].search(said[n].normalised):
                chosen.add(n - 1)
        return [said[n] for n in sorted(chosen)]

    def _surest(self, words: str, said: Sequence[WeighedSentence]) -> int:
        """How surely the surest of some sentences states a wish."""
        return max((core_of(words[one.start : one.end], self.patterns).surely for one in said), default=NONE)

    def parts_of(self, normalised: str) -> set[str]:
        """The words, pairs of words and kinds of words of a sentence, as the file of weights has them."""
        words = ("__" if one[0] == "_" else "0" if one[0].isdigit() else one for one in _TOKEN.findall(normalised))
        listed = ["^", *words, "$"]
        kinds = [f"~{self._kind_of(word)}" for word in listed]
        parts = {f"{one} {other}" for one, other in chain(pairwise(listed), pairwise(kinds))}
        parts.update(f"{one} {other} {third}" for one, other, third in zip(kinds, kinds[1:], kinds[2:], strict=False))
        return parts.union(listed[1:-1], (f"{one} * {other}" for one, other in zip(listed, listed[2:], strict=False)))

    @cached_property
    def _kind_of(self) -> Callable[[str], str]:
        return lru_cache(maxsize=_MOST_WORDS)(self._find_kind)

    def _find_kind(self, word: str) -> str:
        """A small word itself, and otherwise which kind of word it is."""
        if not word[0].isalpha() or word in self._small_words:
            return word
        if self.patterns["shape_word"].fullmatch(word):
            return "SHAPE"
        return "VERB" if self.patterns["verb_word"].fullmatch(word) else "WORD"

    def _asks(self, normalised: str) -> bool:
        patterns = self.patterns
        asks = patterns["question"].match(normalised) or ends_with_question(normalised)
        return bool(asks) and not (patterns["request"].search(normalised) or patterns["tag"].search(normalised))

    def _sum(self, parts: Iterable[str]) -> float:
        # A plain sum would depend on the order of a set, which is another one in each process.
        return round(math.fsum(self.weights.get(part, 0.0) for part in parts), 3)


def quotes(words: str, response: str) -> bool:
    """Whether a sentence quotes the answer."""
    said = normalise(response)
    quoted = (words[match.start() + 1 : match.end() - 1] for match in _MASKED.finditer(mask_quotations(words)))
    return any(len(part) > 1 and normalise(part).strip(" .!?,") in said for part in quoted)


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
        #: Weighs wishes that no pattern describes; None if the language has no signals for that.
        self.scale = Scale(table) if "weighed" in table else None

    @cached_property
    def wishes(self) -> Mapping[str, Sequence[re.Pattern[str]]]:
        """Lists of clauses that are wishes."""
        given = self._table["wishes"]
        return {name: list(map(self._compiled, given[name])) for name in ("wishes", "standing_wishes", "after_wish")}

    @cached_property
    def rewritten(self) -> Sequence[Rewriting]:
        return read_rewritings(self._table, self._table["wishes"]["rewritten"])

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
        if self.scale:
            self.scale.compile()
        for name, value in self._table["wishes"].items():
            if isinstance(value, str):
                _ = self.patterns[name]

    @cached_property
    def topic_names(self) -> frozenset[str]:
        return frozenset(name for _, name in self.topics)

    def topic(self, normalised: str) -> str:
        """What a normalised clause is about: a named topic, or its first content words."""
        named = next((name for when, name in self.topics if when.search(normalised)), None)
        return named or " ".join(self.content(normalised)[:_MOST_TOPIC_WORDS]) or "other"

    def content(self, normalised: str) -> list[str]:
        """The words of a normalised clause that say what it is about."""
        return [word for word in _LETTERS.findall(normalised) if word not in self.topic_noise]

    def count_small_words(self, normalised: str) -> int:
        """How many words of a normalised text are small words of the language."""
        return sum(word in self.small_words for word in _WORDS.findall(normalised))


def grammars_for(normalised: str) -> list[WishGrammar]:
    """The languages that a normalised text may be in, the likeliest first."""
    hits = [
        (grammar.count_small_words(normalised), grammar)
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
