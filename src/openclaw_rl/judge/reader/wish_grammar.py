"""How wishes about answers are phrased in each language: the `[wishes]` tables of the phrase files.

All values are regular expressions over normalised text, with the word groups of the file's `[words]`:

- lead, tail: courtesy and introductions ("could you", "from now on") before and after a wish; they are removed
- split: where a clause ends, besides commas, colons and semicolons
- standing, once: the wish is for all answers, or for one
- follow_up: a question that only asks for more of this answer: an example, details, sources
- reported: the sentence reports what others say
- never: clauses that look like a wish but are none
- document: a request for a text or a program, whose form a wish after it is about
- unsafe: words that try to change whom the assistant obeys
- wishes: clauses that are wishes in the user's own words; standing_wishes: only in a sentence with `standing`
- beside: clauses that are wishes after another wish of the same message
- rewritten: clauses that become a wish: `when`, and `say` with the groups of `when`
- topics: `name`, and the words (`when`) that show the topic; the first that matches counts
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from openclaw_rl.judge.reader.instructions import word_list
from openclaw_rl.judge.reader.phrasebook import SCRIPTS, expand, tables

_WORD = re.compile(r"[^\W\d_]+")
#: Words of a topic that no table names.
_MOST_TOPIC_WORDS = 3
#: With fewer small words of any language, all languages of the script are tried.
_FEW_SMALL_WORDS = 2


class Rewriting(NamedTuple):
    """A clause that becomes a wish."""

    when: re.Pattern[str]
    say: str


class NamedTopic(NamedTuple):
    """A topic, and the words that show it."""

    name: str
    when: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class WishGrammar:
    """How wishes are phrased in one language."""

    script: re.Pattern[str]
    small_words: frozenset[str]
    topic_noise: frozenset[str]
    """Words that say nothing about the topic of a wish."""
    lead: re.Pattern[str]
    tail: re.Pattern[str]
    split: re.Pattern[str]
    standing: re.Pattern[str]
    once: re.Pattern[str]
    follow_up: re.Pattern[str]
    reported: re.Pattern[str]
    never: re.Pattern[str]
    document: re.Pattern[str]
    unsafe: re.Pattern[str]
    wishes: Sequence[re.Pattern[str]]
    standing_wishes: Sequence[re.Pattern[str]]
    beside: Sequence[re.Pattern[str]]
    rewritten: Sequence[Rewriting]
    topics: Sequence[NamedTopic]

    def topic(self, plain: str) -> str:
        """What a normalised clause is about: a named topic, or its first content words."""
        named = next((topic.name for topic in self.topics if topic.when.search(plain)), None)
        if named:
            return named
        words = [word for word in _WORD.findall(plain) if word not in self.topic_noise]
        return " ".join(words[:_MOST_TOPIC_WORDS]) or "other"


def grammars_for(plain: str) -> list[WishGrammar]:
    """The languages that a normalised text may be in, the likeliest first."""
    words = re.findall(r"\w+", plain)
    hits = [
        (sum(word in grammar.small_words for word in words), grammar)
        for grammar in all_grammars()
        if grammar.script.search(plain)
    ]
    most = max((count for count, _ in hits), default=0)
    likely = [pair for pair in hits if most < _FEW_SMALL_WORDS or pair[0] >= 0.6 * most]
    return [grammar for _, grammar in sorted(likely, key=lambda pair: -pair[0])]


@cache
def all_grammars() -> tuple[WishGrammar, ...]:
    """The grammar of each phrase file that has one."""
    return tuple(read_grammar(table) for table in tables() if "wishes" in table)


def read_grammar(table: dict[str, Any]) -> WishGrammar:
    words, given = table.get("words", {}), table["wishes"]

    def pattern(phrase: str) -> re.Pattern[str]:
        return re.compile(expand(phrase, words))

    return WishGrammar(
        script=SCRIPTS[table["script"]],
        small_words=word_list(table, "small_words"),
        topic_noise=word_list(table, "small_words") | word_list(table, "words_of_asking"),
        lead=pattern(given["lead"]),
        tail=pattern(given["tail"]),
        split=pattern(given["split"]),
        standing=pattern(given["standing"]),
        once=pattern(given["once"]),
        follow_up=pattern(given["follow_up"]),
        reported=pattern(given["reported"]),
        never=pattern(given["never"]),
        document=pattern(given["document"]),
        unsafe=pattern(given["unsafe"]),
        wishes=[pattern(phrase) for phrase in given["wishes"]],
        standing_wishes=[pattern(phrase) for phrase in given["standing_wishes"]],
        beside=[pattern(phrase) for phrase in given["beside"]],
        rewritten=[Rewriting(pattern(one["when"]), one["say"]) for one in given["rewritten"]],
        topics=[NamedTopic(one["name"], pattern(one["when"])) for one in given["topics"]],
    )
