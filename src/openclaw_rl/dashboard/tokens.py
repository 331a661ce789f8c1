"""A response token by token: the advantage of each, as a colour and in words."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

from openclaw_rl.methods.base import NoSignal, teacher_logprobs
from openclaw_rl.rendering.detokenize import token_bytes
from openclaw_rl.types import StoredTurn

#: Tokens of a response that are shown.
MAX_TOKENS = 600
#: Opacity of the largest advantage's colour: text must stay readable on it.
MAX_STRENGTH = 0.6
_NEWLINE = "↵"


@dataclass(frozen=True, slots=True)
class Piece:
    """One token, or several that only together make a character."""

    text: str
    tip: str
    """What is known of its tokens, one line each."""
    advantage: float
    """The mean of its tokens' advantages."""
    strength: float
    """Of its colour, from 0 to `MAX_STRENGTH`."""


def pieces(tokenizer: Tokenizer, turn: StoredTurn, advantages: Sequence[float]) -> list[Piece]:
    """The first `MAX_TOKENS` of a response in pieces. `advantages` has one number per token, or is empty."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    largest = max(map(abs, advantages), default=0.0)
    made: list[Piece] = []
    text, group = "", list[int]()
    last = min(len(turn.response_ids), MAX_TOKENS) - 1
    tips = describe(tokenizer, turn, advantages)
    for place, token in enumerate(turn.response_ids[: last + 1]):
        text += decoder.decode(token_bytes(tokenizer, token), final=place == last)
        group.append(place)
        # Bytes of an unfinished character wait for the next token.
        if not decoder.getstate()[0]:
            worth = sum(advantages[i] for i in group) / len(group) if advantages else 0.0
            made.append(Piece(visible(text), "\n".join(tips[i] for i in group), worth, strength(worth, largest)))
            text, group = "", []
    return made


def visible(text: str) -> str:
    """A line break would show no colour: it gets a visible sign."""
    return text if text.strip("\n") else text.replace("\n", f"{_NEWLINE}\n")


def strength(advantage: float, largest: float) -> float:
    """The square root, so that one outlier does not make all others pale."""
    return round(MAX_STRENGTH * (abs(advantage) / largest) ** 0.5, 3) if largest else 0.0


def describe(tokenizer: Tokenizer, turn: StoredTurn, advantages: Sequence[float]) -> list[str]:
    """One line per token: its text, its recorded log-prob, the teacher's, the advantage; as far as they are known."""
    count = min(len(turn.response_ids), MAX_TOKENS)
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
