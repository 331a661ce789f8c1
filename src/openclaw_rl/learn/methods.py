"""What each response token of a judged turn is to learn: the methods, as advantages per token.

`rl` broadcasts the score. `opd` is the teacher's log-prob, once it knows the hint, minus the one recorded while
sampling, within a limit. `combine` is the weighted sum of both, each absent where its signal is: a sample without a
hint has no distillation term, one without a score has no reward term.

Signals may be measured from their mean over the batch (`Baseline`). A constant added to every advantage has no meaning
of its own, but answers are sampled at a temperature below 1: then it sharpens or flattens the policy all the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

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
    opd_clip: float = math.inf
    """The largest gap between teacher and policy that counts, either way."""
    centred: bool = False
    """Whether a signal counts as far as it differs from its mean over the batch."""

    @classmethod
    def of(cls, config: Config) -> "Weights":
        settings = (config.opd_clip or math.inf, config.baseline == "batch")
        if config.method == "combine":
            return cls(config.w_opd, config.w_rl, *settings)
        return cls(float(config.method == "opd"), float(config.method == "rl"), *settings)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What each signal is measured from."""

    gap: float = 0.0
    score: float = 0.0


NOTHING = Baseline()


def advantages(turn: StoredTurn, weights: Weights, baseline: Baseline = NOTHING) -> list[float]:
    """One number for each token of the response. Raises NoSignal, whatever the baseline is."""
    if len(turn.logprobs) != len(turn.response_ids):
        raise NoSignal("its log-probs were not recorded")
    gaps, score = gaps_of(turn, weights), score_of(turn, weights)
    if not (gaps and any(gaps)) and not score:
        raise NoSignal("nothing in it weighs anything with this method")
    if not all(map(math.isfinite, (*(gaps or ()), score or 0.0, *turn.logprobs))):
        # One such number would take the whole batch down with it.
        raise NoSignal("a log-prob in it is not finite")
    reward = 0.0 if score is None else weights.rl * (score - baseline.score)
    if gaps is None:
        return [reward] * len(turn.response_ids)
    return [weights.opd * (gap - baseline.gap) + reward for gap in gaps]


def batch_baseline(turns: Sequence[StoredTurn], weights: Weights) -> Baseline:
    """The means over a batch: of the gaps over all tokens that have one, of the scores over all samples."""
    if not weights.centred:
        return NOTHING
    gaps = [gap for turn in turns for gap in gaps_of(turn, weights) or ()]
    scores = [score for turn in turns if (score := score_of(turn, weights)) is not None]
    return Baseline(fmean(gaps) if gaps else 0.0, fmean(scores) if scores else 0.0)


def gaps_of(turn: StoredTurn, weights: Weights) -> list[float] | None:
    """The teacher's log-prob minus the policy's for each token, where the method asks and a hint is there."""
    if turn.sample not in (SampleKind.OPD, SampleKind.OPD_RL) or not weights.opd:
        return None
    pairs = zip(teacher_logprobs(turn), turn.logprobs, strict=True)
    return [clipped(teacher - own, weights.opd_clip) for teacher, own in pairs]


def score_of(turn: StoredTurn, weights: Weights) -> float | None:
    """The score, where the method asks for it."""
    if turn.sample not in (SampleKind.RL, SampleKind.OPD_RL) or not weights.rl:
        return None
    score = turn.verdict.score if turn.verdict else None
    if score is None:
        raise NoSignal("it has no score")
    return score


def clipped(value: float, limit: float) -> float:
    """What is not a number stays none."""
    return min(max(value, -limit), limit) if math.isfinite(value) else value


def teacher_logprobs(turn: StoredTurn) -> list[float]:
    """What the teacher says of each token, with the best hint that it has scored."""
    hints = turn.verdict.hints if turn.verdict else ()
    scored = next((hint for hint in hints if hint.logprobs), None)
    if scored is None or len(scored.logprobs) != len(turn.response_ids):
        raise NoSignal("no teacher has scored it")
    return list(scored.logprobs)
