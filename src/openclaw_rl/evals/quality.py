"""A guard beside the rules: whether an answer is one at all, however well it keeps to what somebody prefers.

Rules that only count words are satisfied by an empty answer. This looks for what is empty, endless, garbled, only the
question again, or about something else. Cheap, deterministic, never raises, and needs no model; a caller that has one
can give the answer's perplexity under the base weights. It does not know whether an answer is true.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.evals.words import CJK, stems, words_of

#: Of the smaller one of the two sets of content words, the answer's and the question's with its reference.
LEAST_OVERLAP = 0.15
#: Of the question's content words. A short answer in other words than the reference's is still about what it names.
LEAST_NAMED = 0.5
#: Of 96 answers of a 135M model none was over 14 and of as many written by hand none over 250, under its base weights;
#: of the same answers with their words in random order three in four were over 280.
MOST_PERPLEXITY = 300.0
#: What is looked at of a long answer.
LONGEST = 8_000
#: A letter so often in a row is in no word; other signs draw lines and tables.
_MOST_SAME_LETTERS, _MOST_SAME_SIGNS = 5, 60
#: Below this many words nothing can be said about repetition.
_ENOUGH_WORDS = 8
#: Of all words. "The" is 7 % of English.
_MOST_OF_ONE_WORD = 0.4
#: Of a text's runs of so many words, the share that must occur only once.
_RUN, _LEAST_DISTINCT_RUNS = 4, 0.5
#: The same words so often one after another.
_MOST_IN_A_ROW = 4
_LONGEST_CYCLE = 8
#: Of all words.
_MOST_GARBLED = 0.3
#: Of all characters that are no spaces.
_LEAST_WRITING = 0.5
_SAME_LETTERS = re.compile(rf"([^\W\d_])\1{{{_MOST_SAME_LETTERS},}}")
_SAME_SIGNS = re.compile(rf"([^\w\s])\1{{{_MOST_SAME_SIGNS},}}")
_NO_VOWEL = re.compile(r"[b-df-hj-np-tv-xz]{5,}")
_LATIN = re.compile(r"[a-z]+")
_LONGEST_WORD = 28


@dataclass(frozen=True, slots=True)
class Quality:
    """What was found."""

    ok: bool
    reasons: tuple[str, ...]
    """What is wrong, each in a few words; none if it is ok."""
    overlap: float
    """How much of what the answer is about belongs to the question and its reference, 0 to 1."""


def check(answer: str, question: str, reference: str, *, perplexity: float | None = None) -> Quality:
    """Check an answer; `perplexity` is that of the answer under the base model, where the caller knows it."""
    answer = answer[:LONGEST]
    words = words_of(answer)
    overlap = overlap_of(answer, f"{question} {reference}")
    if not words:
        return Quality(False, ("it is empty",), 0.0)
    found = {
        "it repeats itself": repeats(words),
        "one character goes on and on": bool(_SAME_LETTERS.search(answer) or _SAME_SIGNS.search(answer)),
        "it is garbled": is_garbled(answer, words),
        "it only repeats the question": is_echo(answer, question),
        "it is about something else": overlap < LEAST_OVERLAP and named_share(answer, question) < LEAST_NAMED,
        "the base model finds it improbable": perplexity is not None and not perplexity <= MOST_PERPLEXITY,
    }
    reasons = tuple(reason for reason, holds in found.items() if holds)
    return Quality(not reasons, reasons, overlap)


def overlap_of(answer: str, about: str) -> float:
    """The content words that two texts share, as a share of those that the smaller one has."""
    said, meant = stems(answer), stems(about)
    return len(said & meant) / min(len(said), len(meant)) if said and meant else 0.0


def named_share(answer: str, question: str) -> float:
    """Of what a question is about, the share that an answer names."""
    asked = stems(question)
    return len(stems(answer) & asked) / len(asked) if asked else 0.0


def repeats(words: Sequence[str]) -> bool:
    """Whether words come over and over: one of them, some in a circle, or whole passages."""
    if has_cycle(words):
        return True
    if len(words) < _ENOUGH_WORDS:
        return False
    if Counter(words).most_common(1)[0][1] > _MOST_OF_ONE_WORD * len(words):
        return True
    runs = [tuple(words[place : place + _RUN]) for place in range(len(words) - _RUN + 1)]
    return len(set(runs)) < _LEAST_DISTINCT_RUNS * len(runs)


def has_cycle(words: Sequence[str]) -> bool:
    """Whether the same few words come more than four times in a row. Numbers may: they are sums."""
    for length in range(1, _LONGEST_CYCLE + 1):
        same = 0
        for place in range(length, len(words)):
            same = same + 1 if words[place] == words[place - length] and not words[place].isdigit() else 0
            if same >= length * _MOST_IN_A_ROW:
                return True
    return False


def is_garbled(answer: str, words: Sequence[str]) -> bool:
    """Whether much of it is no writing: signs instead of letters, or letters that make no words."""
    visible = [char for char in answer if not char.isspace()]
    writing = sum(char.isalnum() for char in visible)
    # A sum has as many signs as digits, and that is fine.
    if writing < _LEAST_WRITING * len(visible) and not any(char.isdigit() for char in visible):
        return True
    if "\ufffd" in answer and answer.count("\ufffd") > 0.02 * len(visible):
        return True
    spelled = [word for word in words if len(word) > 1 and not word.isdigit() and not CJK.match(word)]
    return bool(spelled) and sum(map(is_no_word, spelled)) > _MOST_GARBLED * len(spelled)


def is_no_word(word: str) -> bool:
    """Whether nobody could say it: endless, digits among letters, or consonants only."""
    if len(word) > _LONGEST_WORD:
        return True
    mixed = any(char.isdigit() for char in word) and len(word) > 4 and not word[0].isdigit()
    if not _LATIN.fullmatch(word):
        return mixed
    vowels = sum(char in "aeiouy" for char in word)
    return mixed or _NO_VOWEL.search(word) is not None or (len(word) > 3 and vowels == 0)


def is_echo(answer: str, question: str) -> bool:
    """Whether an answer says nothing that the question did not say."""
    said = stems(answer)
    return bool(said) and said <= stems(question)
