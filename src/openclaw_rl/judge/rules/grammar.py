"""How wishes are phrased in each language.

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
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from typing import Any

from openclaw_rl.judge.rules.phrases import SCRIPTS, expand, tables, word_list
from openclaw_rl.judge.rules.weighing import Rewriting, Scale, read_rewritings

#: Words of a topic that no table names.
_MOST_TOPIC_WORDS = 3
#: With fewer small words of any language, all languages of the script are tried.
_FEW_SMALL_WORDS = 2
_LETTERS = re.compile(r"[^\W\d_]+")
_WORD = re.compile(r"\w+")


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

    def topic(self, normalised: str) -> str:
        """What a normalised clause is about: a named topic, or its first content words."""
        named = next((name for when, name in self.topics if when.search(normalised)), None)
        return named or " ".join(self.content(normalised)[:_MOST_TOPIC_WORDS]) or "other"

    def content(self, normalised: str) -> list[str]:
        """The words of a normalised clause that say what it is about."""
        return [word for word in _LETTERS.findall(normalised) if word not in self.topic_noise]

    def count_small_words(self, normalised: str) -> int:
        """How many words of a normalised text are small words of the language."""
        return sum(word in self.small_words for word in _WORD.findall(normalised))


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
