"""The quality guard: whether a text is a sensible answer at all, apart from the persona's rules.

Some rules are satisfied by an answer without content. The guard rejects answers that are empty, repetitive, garbled,
off topic, or only the question again. It is cheap and deterministic, never raises, and needs no model; a caller with a
model can add the answer's perplexity under the base model. It does not know whether an answer is true.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from openclaw_rl.evals.words import CJK, stems, words_of

#: The share of content words that the answer has in common with the question and its reference, of the smaller set.
MIN_OVERLAP = 0.15
#: An answer that names this share of the question's content words is on topic, also if its overlap is small.
MIN_NAMED = 0.5
#: Under a 135M base model, none of its own 96 answers was over 14 and none of 96 hand-written ones over 250. With their
#: words shuffled, three in four of these answers were over 280.
MAX_PERPLEXITY = 300.0
#: The rest of a longer answer is ignored.
MAX_CHARACTERS = 8_000
#: How often one letter, or one other sign, may repeat in a row. Signs draw lines and tables, so their limit is higher.
_MAX_SAME_LETTERS, _MAX_SAME_SIGNS = 5, 60
#: Shorter texts are not checked for repeated words.
_MIN_WORDS = 8
#: The share of all words that one word may have. "The" is 7 % of English.
_MAX_SHARE_OF_ONE_WORD = 0.4
#: The length of a run of words, and the share of a text's runs that must be distinct.
_RUN, _MIN_DISTINCT_RUNS = 4, 0.5
#: How often the same few words may repeat in a row, and how many words such a cycle may have.
_MAX_REPEATS = 4
_MAX_CYCLE_WORDS = 8
#: The share of all words that may be unpronounceable.
_MAX_GARBLED = 0.3
#: The share of visible characters that must be letters or digits.
_MIN_WRITING = 0.5
_SAME_LETTERS = re.compile(rf"([^\W\d_])\1{{{_MAX_SAME_LETTERS},}}")
_SAME_SIGNS = re.compile(rf"([^\w\s])\1{{{_MAX_SAME_SIGNS},}}")
_NO_VOWEL = re.compile(r"[b-df-hj-np-tv-xz]{5,}")
_LATIN = re.compile(r"[a-z]+")
_MAX_WORD_LETTERS = 28


@dataclass(frozen=True, slots=True)
class Quality:
    """The result of the check."""

    ok: bool
    reasons: tuple[str, ...]
    """What is wrong, each in a few words; empty if the answer is ok."""
    overlap: float
    """The share of content words in common with the question and its reference, from 0 to 1."""


def check(answer: str, question: str, reference: str, *, perplexity: float | None = None) -> Quality:
    """Check an answer. `perplexity` is the answer's perplexity under the base model, if the caller knows it."""
    answer = answer[:MAX_CHARACTERS]
    words = words_of(answer)
    overlap = overlap_of(answer, f"{question} {reference}")
    if not words:
        return Quality(False, ("it is empty",), 0.0)
    faults = {
        "it repeats itself": repeats(words),
        "one character goes on and on": bool(_SAME_LETTERS.search(answer) or _SAME_SIGNS.search(answer)),
        "it is garbled": is_garbled(answer, words),
        "it only repeats the question": is_echo(answer, question),
        "it is about something else": overlap < MIN_OVERLAP and named_share(answer, question) < MIN_NAMED,
        "the base model finds it improbable": perplexity is not None and not perplexity <= MAX_PERPLEXITY,
    }
    reasons = tuple(reason for reason, holds in faults.items() if holds)
    return Quality(not reasons, reasons, overlap)


def overlap_of(answer: str, about: str) -> float:
    """The content words that two texts have in common, as a share of the smaller set."""
    ours, theirs = stems(answer), stems(about)
    return len(ours & theirs) / min(len(ours), len(theirs)) if ours and theirs else 0.0


def named_share(answer: str, question: str) -> float:
    """The share of a question's content words that an answer names."""
    asked = stems(question)
    return len(stems(answer) & asked) / len(asked) if asked else 0.0


def repeats(words: Sequence[str]) -> bool:
    """Whether words repeat too often: one word, a short cycle, or whole passages."""
    if has_cycle(words):
        return True
    if len(words) < _MIN_WORDS:
        return False
    if Counter(words).most_common(1)[0][1] > _MAX_SHARE_OF_ONE_WORD * len(words):
        return True
    runs = [tuple(words[place : place + _RUN]) for place in range(len(words) - _RUN + 1)]
    return len(set(runs)) < _MIN_DISTINCT_RUNS * len(runs)


def has_cycle(words: Sequence[str]) -> bool:
    """Whether the same few words repeat more than four times in a row. Numbers may repeat, in sums for example."""
    for length in range(1, _MAX_CYCLE_WORDS + 1):
        same = 0
        for place in range(length, len(words)):
            same = same + 1 if words[place] == words[place - length] and not words[place].isdigit() else 0
            if same >= length * _MAX_REPEATS:
                return True
    return False


def is_garbled(answer: str, words: Sequence[str]) -> bool:
    """Whether much of the text is not writing: signs instead of letters, or letters that form no words."""
    visible = [char for char in answer if not char.isspace()]
    writing = sum(char.isalnum() for char in visible)
    # A formula may have as many signs as digits.
    if writing < _MIN_WRITING * len(visible) and not any(char.isdigit() for char in visible):
        return True
    if "\ufffd" in answer and answer.count("\ufffd") > 0.02 * len(visible):
        return True
    spelled = [word for word in words if len(word) > 1 and not word.isdigit() and not CJK.match(word)]
    return bool(spelled) and sum(map(is_no_word, spelled)) > _MAX_GARBLED * len(spelled)


def is_no_word(word: str) -> bool:
    """Whether a word is unpronounceable: too long, digits among letters, or only consonants."""
    if len(word) > _MAX_WORD_LETTERS:
        return True
    mixed = any(char.isdigit() for char in word) and len(word) > 4 and not word[0].isdigit()
    if not _LATIN.fullmatch(word):
        return mixed
    vowels = sum(char in "aeiouy" for char in word)
    return mixed or _NO_VOWEL.search(word) is not None or (len(word) > 3 and vowels == 0)


def is_echo(answer: str, question: str) -> bool:
    """Whether an answer has no content word that is not in the question."""
    words = stems(answer)
    return bool(words) and words <= stems(question)
