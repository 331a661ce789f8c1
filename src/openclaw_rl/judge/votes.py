"""Parses a judge's answers into votes, and counts them."""

import re
from collections import Counter
from collections.abc import Sequence

from openclaw_rl.types import Question, Vote

#: Matches any box; the group is empty if there is no number in it.
_BOXED = re.compile(r"\\boxed\s*\{(?:\s*([+-]?\d+)\s*\})?")
_HINT_START, _HINT_END = "[HINT_START]", "[HINT_END]"
#: Also matches thoughts without an answer after them.
_THOUGHTS = re.compile(r"\A.*</think>|\A\s*<think>.*\Z", re.DOTALL)
#: A hint needs more characters than this.
MIN_HINT = 10
SCORES = (-1, 0, 1)
HINT_ACCEPTED, NO_HINT = 1, -1


def parse(question: Question, text: str, seconds: float = 0.0, tokens: int = 0, *, cut_off: bool = False) -> Vote:
    """Parse a vote from a judge's answer. If it cannot be read or was cut off, its value is None."""
    # Thoughts may contain several answers. Only the one after them counts.
    answer = "" if cut_off else _THOUGHTS.sub("", text)
    boxes = _BOXED.findall(answer)
    value: int | None = int(boxes[-1]) if boxes and 1 <= len(boxes[-1]) <= 2 else None
    hint = ""
    if question is Question.HINT:
        value, hint = _hint(answer, value)
    elif value not in SCORES:
        value = None
    return Vote(question, value, hint, text, seconds, tokens)


def _hint(answer: str, value: int | None) -> tuple[int | None, str]:
    """The vote's value and hint. An accepting box and a hint count only together."""
    if value == NO_HINT:
        return NO_HINT, ""
    # Not a regular expression: its time would grow with the square of the number of starts.
    *parts, _after = answer.split(_HINT_END)
    hints = [words for _, start, words in (part.partition(_HINT_START) for part in parts) if start]
    hint = " ".join(hints[-1].split()) if hints else ""
    return (HINT_ACCEPTED, hint) if value == HINT_ACCEPTED and len(hint) > MIN_HINT else (None, "")


def tally(votes: Sequence[Vote], threshold: float = 0.0) -> float | None:
    """The score that most valid votes give; 0 on a tie or below the threshold; None without a valid vote."""
    values = [vote.value for vote in votes if vote.value is not None]
    if not values:
        return None
    (winner, count), *others = Counter(values).most_common()
    tied = bool(others) and others[0][1] == count
    return 0.0 if tied or count / len(values) < threshold else winner


def accepted_hints(votes: Sequence[Vote]) -> tuple[str, ...] | None:
    """The hints that votes accepted, each once, the most informative (longest) first; None without a valid vote."""
    if all(vote.value is None for vote in votes):
        return None
    hints = dict.fromkeys(vote.hint for vote in votes if vote.value == HINT_ACCEPTED)
    return tuple(sorted(hints, key=len, reverse=True))


def agreement(votes: Sequence[Vote]) -> float | None:
    """The winner's share of the valid votes."""
    values = [vote.value for vote in votes if vote.value is not None]
    return Counter(values).most_common(1)[0][1] / len(values) if values else None
