"""Plain prompts that every policy is asked, and the test that says whether a policy answers them worse than another.

The prompts are everyday questions that we ship, and some of the run's own first messages. Only sense counts: short
answers, another language or a pirate's tone are not worse.
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import conversation_starts, load_readable
from openclaw_rl.sense import check, words_of

PROMPTS = Path(__file__).with_name("plain_prompts.jsonl")
#: The run's own first messages: how many are asked, how long they may be, and how many turns are looked at for them.
MAX_OWN, MAX_OWN_CHARACTERS, MAX_SEARCHED_TURNS = 8, 300, 50
#: A policy is asked again, with other draws, while its answers are this improbable for one that is as good as the
#: reference. It is worse if after the last round all answers are so improbable, and the share of sensible ones fell by
#: so much; after earlier rounds, if it is clear. Of policies that do not change, fewer than 1 in 50 are called worse
#: within 50 examinations; a fall from 0.97 to 0.79 is found by a single one in more than 9 of 10 cases
#: (tests/learn/test_guard.py).
SUSPICIOUS, WORSE, CLEARLY_WORSE, MIN_FALL, MAX_ROUNDS = 0.2, 0.0002, 1e-6, 0.08, 5
#: Words that show that a text is in English, and the share of them and the number of words that say so.
_ENGLISH_WORDS = "the of and to is are that it you for with this be by from or have can your they their"
_ENGLISH = frozenset(_ENGLISH_WORDS.split())
_MIN_ENGLISH, _MIN_WORDS = 0.08, 5


@dataclass(frozen=True, slots=True)
class PlainPrompt:
    """A question that every policy is asked."""

    key: str
    """The same for the same question in every program."""
    text: str
    reference: str = ""
    """What an answer is about; empty if nobody knows, so that it may be about anything."""
    owner: str = ""

    def is_sensible(self, answer: str) -> bool:
        anything = not self.reference or is_other_language(answer)
        return check(answer, self.text, self.reference, translated=anything).ok

    def seed(self, draw: int) -> int:
        """Of the random numbers for one of its answers, whichever policy gives it."""
        return zlib.crc32(f"{self.key} {draw}".encode())


def is_other_language(answer: str) -> bool:
    """Whether an answer is long enough to be in English, and is not."""
    words = words_of(answer)
    return len(words) >= _MIN_WORDS and sum(word in _ENGLISH for word in words) < _MIN_ENGLISH * len(words)


@cache
def plain_prompts() -> tuple[PlainPrompt, ...]:
    """The questions that we ship."""
    read = map(json.loads, PROMPTS.read_text("utf-8").splitlines())
    return tuple(PlainPrompt(f"plain-{zlib.crc32(one['text'].encode()):08x}", **one) for one in read)


def own_prompts(ledger: Ledger, owner: str | None = None) -> list[PlainPrompt]:
    """The first messages of the run's first conversations, or of an owner's: short ones, without a system prompt and
    tools, each once."""
    found: dict[str, PlainPrompt] = {}
    for number in ledger.read(conversation_starts, MAX_SEARCHED_TURNS, owner):
        turn = ledger.read(load_readable, number)
        messages = turn.messages if turn else []
        text = messages[0].get("content") if len(messages) == 1 and messages[0].get("role") == "user" else None
        if turn and isinstance(text, str) and text.strip() and len(text) <= MAX_OWN_CHARACTERS:
            found.setdefault(text, PlainPrompt(f"turn-{number}", text, owner=turn.session.owner))
        if len(found) == MAX_OWN:
            break
    return list(found.values())


@dataclass(frozen=True, slots=True)
class PlainAnswers:
    """How a policy answered."""

    version: int
    sensible: Mapping[str, Sequence[bool]] = field(default_factory=dict)
    """For each prompt: whether its answers were sensible, one for each round."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """By the names in `NUMBERS`, of the first round."""
    created: float = 0.0

    @property
    def passed(self) -> int:
        return sum(map(sum, self.sensible.values()))

    @property
    def asked(self) -> int:
        return sum(map(len, self.sensible.values()))

    def shared(self, other: "PlainAnswers") -> "PlainAnswers":
        """The same without the prompts that another policy was not asked."""
        return replace(self, sensible={key: got for key, got in self.sensible.items() if key in other.sensible})


def probability(reference: PlainAnswers, policy: PlainAnswers) -> float:
    """How probable so few sensible answers are for a policy that answers each prompt as well as the reference.

    It is exact: given how many answers to a prompt were sensible in all, every division of them between the two is
    equally probable. With one answer of each it is McNemar's test.
    """
    chances, passed = np.ones(1), 0
    for key, got in policy.sensible.items():
        before = reference.sensible.get(key)
        both = sum(before or ()) + sum(got)
        # Where all answers are sensible, or none, there is one division.
        if before and 0 < both < len(before) + len(got):
            chances = np.convolve(chances, _divisions(len(before), len(got), both))
            passed += sum(got)
    return float(chances[: passed + 1].sum())


@cache
def _divisions(others: int, own: int, sensible: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """The chances that 0, 1, … of `own` answers are among the sensible ones."""
    ways = [math.comb(own, n) * math.comb(others, sensible - n) if n <= sensible else 0 for n in range(own + 1)]
    return np.array(ways) / math.comb(own + others, sensible)


def why_worse(reference: PlainAnswers, policy: PlainAnswers, limit: float = WORSE) -> str:
    """Why a policy is worse than the reference; empty if it may be as good."""
    before, now = reference.shared(policy), policy.shared(reference)
    if probability(reference, policy) >= limit or before.passed / before.asked - now.passed / now.asked < MIN_FALL:
        return ""
    of = "" if before.asked == now.asked else f" of {before.asked}"
    return f"sensible answers to plain prompts fell from {before.passed}{of} to {now.passed} of {now.asked}"
