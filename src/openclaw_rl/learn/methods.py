"""What each response token of a judged turn is to learn: the methods, as advantages per token.

`rl` broadcasts the score. `opd` is the teacher's log-prob, once it knows the hint, minus the one recorded while
sampling. `combine` is the weighted sum of both, each absent where its signal is: a sample without a hint has no
distillation term, one without a score has no reward term.
"""

import math
from dataclasses import dataclass

from openclaw_rl.config import Config
from openclaw_rl.ledger.queries import StoredTurn
from openclaw_rl.types import SampleKind


class NoSignal(ValueError):
    """The turn cannot be trained on; the message says why."""


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each signal counts."""

    opd: float
    rl: float

    @classmethod
    def of(cls, config: Config) -> "Weights":
        if config.method == "combine":
            return cls(config.w_opd, config.w_rl)
        return cls(float(config.method == "opd"), float(config.method == "rl"))


def advantages(turn: StoredTurn, weights: Weights) -> list[float]:
    """One number for each token of the response. Raises NoSignal."""
    if len(turn.logprobs) != len(turn.response_ids):
        raise NoSignal("its log-probs were not recorded")
    total = [0.0] * len(turn.response_ids)
    if turn.sample in (SampleKind.OPD, SampleKind.OPD_RL) and weights.opd:
        gaps = zip(total, teacher_logprobs(turn), turn.logprobs, strict=True)
        total = [value + weights.opd * (teacher - own) for value, teacher, own in gaps]
    if turn.sample in (SampleKind.RL, SampleKind.OPD_RL) and weights.rl:
        score = turn.verdict.score if turn.verdict else None
        if score is None:
            raise NoSignal("it has no score")
        total = [value + weights.rl * score for value in total]
    if not any(total):
        raise NoSignal("nothing in it weighs anything with this method")
    if not all(map(math.isfinite, (*total, *turn.logprobs))):
        # One such number would take the whole batch down with it.
        raise NoSignal("a log-prob in it is not finite")
    return total


def teacher_logprobs(turn: StoredTurn) -> list[float]:
    """What the teacher says of each token, with the best hint that it has scored."""
    hints = turn.verdict.hints if turn.verdict else ()
    scored = next((hint for hint in hints if hint.logprobs), None)
    if scored is None or len(scored.logprobs) != len(turn.response_ids):
        raise NoSignal("no teacher has scored it")
    return list(scored.logprobs)
