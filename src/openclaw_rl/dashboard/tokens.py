"""A response, token by token: what each was worth to the learner, in colours and in words."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from openclaw_rl.methods.base import NoSignal, teacher_logprobs
from openclaw_rl.rendering.detokenize import token_bytes
from openclaw_rl.types import StoredTurn

#: Tokens of a response that are shown.
MOST_TOKENS = 600
#: How strong the colour of the largest advantage is: words must stay readable on it.
STRONGEST = 0.6
_NEWLINE = "↵"


@dataclass(frozen=True, slots=True)
class Piece:
    """One token, or several that make a character only together."""

    text: str
    tip: str
    """What is known of its tokens, a line each."""
    advantage: float
    """The mean of its tokens'."""
    strength: float
    """Of its colour, from 0 to `STRONGEST`."""


def pieces(tokenizer: Tokenizer, turn: StoredTurn, advantages: Sequence[float]) -> list[Piece]:
    """The beginning of a response in pieces. `advantages` has one number a token, or none at all."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    largest = max(map(abs, advantages), default=0.0)
    found: list[Piece] = []
    text, group = "", list[int]()
    last = min(len(turn.response_ids), MOST_TOKENS) - 1
    tips = describe(tokenizer, turn, advantages)
    for place, token in enumerate(turn.response_ids[: last + 1]):
        text += decoder.decode(token_bytes(tokenizer, token), final=place == last)
        group.append(place)
        # Bytes that are no character yet wait for the next token.
        if not decoder.getstate()[0]:
            worth = sum(advantages[i] for i in group) / len(group) if advantages else 0.0
            found.append(Piece(visible(text), "\n".join(tips[i] for i in group), worth, strength(worth, largest)))
            text, group = "", []
    return found


def visible(text: str) -> str:
    """A line's end has no colour of its own: it gets a sign."""
    return text if text.strip("\n") else text.replace("\n", f"{_NEWLINE}\n")


def strength(advantage: float, largest: float) -> float:
    """The root, so that one outlier does not make all others pale."""
    return round(STRONGEST * (abs(advantage) / largest) ** 0.5, 3) if largest else 0.0


def describe(tokenizer: Tokenizer, turn: StoredTurn, advantages: Sequence[float]) -> list[str]:
    """A line a token: its spelling, its recorded log-prob, the teacher's, the advantage; as far as they are known."""
    count = min(len(turn.response_ids), MOST_TOKENS)
    try:
        teacher = teacher_logprobs(turn)
    except NoSignal:
        teacher = []
    lines = []
    for place, token in enumerate(turn.response_ids[:count]):
        spelled = token_bytes(tokenizer, token).decode("utf-8", "backslashreplace")
        parts = [f"{spelled!r} ({token})"]
        numbers = (("log-prob", turn.logprobs), ("teacher", teacher), ("advantage", advantages))
        parts += [f"{name} {values[place]:+.3f}" for name, values in numbers if place < len(values)]
        lines.append(" · ".join(parts))
    return lines
