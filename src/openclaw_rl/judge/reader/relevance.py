"""Decides whether a message is about the response, or asks for something new in words that sound like a complaint."""

import re
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from openclaw_rl.judge.reader.kinds import ReplyKind
from openclaw_rl.judge.reader.lexicon import Lexicon
from openclaw_rl.judge.reader.phrasebook import all_small_words
from openclaw_rl.judge.reader.similarity import content, tokens
from openclaw_rl.judge.reader.text import shorten

_MOST_WORDS = 200
#: A request with few letters ("in a table", "add types") refers to what was said before; one with many does not.
_FEW_LETTERS, _MANY_LETTERS = 32, 60
#: A new request may share fewer words with the turn before by chance.
_LEAST_SHARED = 2
#: "Fix this one: ...": the message brings its own material.
_MATERIAL = re.compile(
    r"\b(?:this(?: one)?|these|following|folgende\w*|diese\w*|suivant\w*|cette|ce|siguiente\w*|est[ea])\b"
    r"[^.!?\n]{0,40}: ?\""
    r"|(?:\b(?:translate|proofread|correct|rewrite|rephrase|ubersetze?|korrigiere|traduis|corrige|traduce)\b|翻译|把|将)"
    r"[^.!?,\n]{0,20}(?:\"\"|: ?\S)"
)
_NEGATIVE = frozenset({ReplyKind.CORRECTION, ReplyKind.REJECTION, ReplyKind.CHANGE_REQUEST})
_WIDE = re.compile("[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


class Topic(NamedTuple):
    """A message and what it may be about."""

    message: str
    """Normalised."""
    lexicon: Lexicon
    before: tuple[str, str]
    """The request and the response."""
    turns: bool = False
    """It praises the response, or says "but", before it asks for something."""
    wishes: bool = False
    """It wants another form, so it must be about the response."""


def is_about(kind: ReplyKind, topic: Topic) -> bool:
    """Whether a message that was read as `kind` is about the response."""
    if topic.wishes:
        return True
    if _MATERIAL.search(topic.message) and not topic.turns:
        return kind not in _NEGATIVE
    if kind is ReplyKind.CHANGE_REQUEST:
        return topic.turns or points_back(topic) or shares_words(topic)
    if kind in (ReplyKind.CORRECTION, ReplyKind.REJECTION):
        if topic.lexicon.find("own", topic.message) or topic.lexicon.find("fresh", topic.message):
            return shares_words(topic, _LEAST_SHARED)
        return (
            length(topic.message) <= _MANY_LETTERS
            or bool(topic.lexicon.find("back", topic.message))
            or shares_words(topic)
        )
    return True


def is_new(topic: Topic) -> bool:
    """Whether a question names things, and none that the turn before named."""
    named = names(topic.message)
    if len(named) < _LEAST_SHARED or topic.lexicon.find("back", topic.message):
        return False
    return not shares_words(topic)


def points_back(topic: Topic) -> bool:
    """Whether a request to change something refers to the response."""
    if topic.lexicon.find("own", topic.message) or topic.lexicon.find("fresh", topic.message):
        return False
    return length(topic.message) <= _FEW_LETTERS or topic.lexicon.find("back", topic.message) is not None


def length(text: str) -> int:
    """The number of letters. A Chinese, Japanese or Korean character counts as three."""
    return len(text) + 2 * len(_WIDE.findall(text))


def shares_words(topic: Topic, least: int = 1) -> bool:
    """Whether the message names something that the request or the response named."""
    named = names(topic.message)
    return any(len(named & names(text)) >= least for text in topic.before)


def names(text: str) -> frozenset[str]:
    """The words of a text that name something; in scripts without spaces, pairs of characters."""
    return names_of(shorten(text))


@lru_cache(maxsize=16)
def names_of(text: str) -> frozenset[str]:
    """The same for a shortened text. It is cached, because reading one message needs it several times."""
    words, small = tokens(text, _MOST_WORDS), all_small_words()
    pairs = {
        one + other
        for one, other in pairwise(words)
        if _WIDE.match(one) and _WIDE.match(other) and not (one in small and other in small)
    }
    return frozenset(word for word in content(words, small) if len(word) >= 3 or word.isdigit()) | pairs
