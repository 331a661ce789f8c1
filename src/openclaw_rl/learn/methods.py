"""What each response token of a judged turn is to learn: the methods, as advantages per token.

`rl` broadcasts the score. `opd` is the teacher's log-prob, once it knows the hint, minus the one recorded while
sampling, within a limit. `combine` is the weighted sum of both, each absent where its signal is: a sample without a
hint has no distillation term, one without a score has no reward term. `topk-select` has the reward term on the sampled
tokens, and distils about the likeliest tokens at each place instead (`topk`).

Signals may be measured from their mean over the batch (`Baseline`). A constant added to every advantage has no meaning
of its own, but answers are sampled at a temperature below 1: then it sharpens or flattens the policy all the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from openclaw_rl.app.config import BOTH_SIGNALS, Config
from openclaw_rl.learn.errors import NoSignal
from openclaw_rl.learn.topk import Distilled, TopK, distil
from openclaw_rl.types import Alternatives, SampleKind, StoredTurn


@dataclass(frozen=True, slots=True)
class Weights:
    """How much each signal counts."""

    opd: float
    rl: float
    opd_clip: float = math.inf
    """The largest gap between teacher and policy that counts, either way."""
    centred: bool = False
    """Whether a signal counts as far as it differs from its mean over the batch."""
    topk: TopK | None = None
    """How the likeliest tokens are distilled, if they are, in place of those that were sampled."""

    @classmethod
    def of(cls, config: Config) -> "Weights":
        settings = (config.opd_clip or math.inf, config.baseline == "batch", TopK.of(config))
        if config.method in BOTH_SIGNALS:
            return cls(config.w_opd, config.w_rl, *settings)
        return cls(float(config.method == "opd"), float(config.method == "rl"), *settings)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What each signal is measured from."""

    gap: float = 0.0
    score: float = 0.0


NOTHING = Baseline()


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a turn's response teaches."""

    advantages: list[float]
    """One number for each token that was sampled."""
    distilled: Distilled | None = None


def lesson(turn: StoredTurn, weights: Weights, baseline: Baseline = NOTHING) -> Lesson:
    """Raises NoSignal, whatever the baseline is."""
    if len(turn.logprobs) != len(turn.response_ids):
        raise NoSignal("its log-probs were not recorded")
    distilled = distilled_of(turn, weights)
    gaps, score = gaps_of(turn, weights), score_of(turn, weights)
    taught = any(gaps or ()) or (distilled is not None and distilled.gaps.any())
    if not taught and not score:
        raise NoSignal("nothing in it weighs anything with this method")
    if not all(map(math.isfinite, (*(gaps or ()), score or 0.0, *turn.logprobs))):
        # One such number would take the whole batch down with it.
        raise NoSignal("a log-prob in it is not finite")
    reward = 0.0 if score is None else weights.rl * (score - baseline.score)
    if gaps is None:
        return Lesson([reward] * len(turn.response_ids), distilled)
    return Lesson([weights.opd * (gap - baseline.gap) + reward for gap in gaps])


def alternatives(distilled: Distilled, weights: Weights, baseline: Baseline) -> Alternatives:
    """What is distilled, as the learner takes it."""
    advantages = weights.opd * distilled.weights * (distilled.gaps - baseline.gap)
    # What does not count may have any log-prob, also none at all.
    old = np.where(distilled.counts, distilled.old_logprobs, 0.0)
    return Alternatives(distilled.ids, old.astype(np.float32), advantages.astype(np.float32))


def worth(turn: StoredTurn, weights: Weights) -> list[float]:
    """What the method makes of each token that was sampled, for people to look at. Raises NoSignal."""
    found = lesson(turn, weights)
    if found.distilled is None:
        return found.advantages
    sampled = found.distilled.ids == np.array(turn.response_ids)[:, None]
    own = (weights.opd * found.distilled.weights * found.distilled.gaps * sampled).sum(1)
    return [reward + gap for reward, gap in zip(found.advantages, own.tolist(), strict=True)]


def batch_baseline(turns: Sequence[StoredTurn], weights: Weights) -> Baseline:
    """The means over a batch's samples: of each one's mean gap, as the loss is a mean of means, and of the scores."""
    if not weights.centred:
        return NOTHING
    gaps = [fmean(own) for turn in turns if (own := taught_gaps(turn, weights))]
    scores = [score for turn in turns if (score := score_of(turn, weights)) is not None]
    return Baseline(mean_of_several(gaps), mean_of_several(scores))


def mean_of_several(values: Sequence[float]) -> float:
    """What a signal is measured from; 0 if one sample alone has it, which its own mean would cancel."""
    return fmean(values) if len(values) > 1 else 0.0


def taught_gaps(turn: StoredTurn, weights: Weights) -> list[float]:
    """The gap at each token that is distilled about, whichever way; none where nothing is."""
    distilled = distilled_of(turn, weights)
    return gaps_of(turn, weights) or [] if distilled is None else distilled.expected().tolist()


def distilled_of(turn: StoredTurn, weights: Weights) -> Distilled | None:
    """What the likeliest tokens teach, where the method asks and a hint is there."""
    if weights.topk is None or not is_hinted(turn) or not weights.opd:
        return None
    try:
        return distil(turn, weights.topk)
    except NoSignal:
        # It may have been judged under other options; its score counts all the same.
        if turn.sample is SampleKind.OPD_RL and weights.rl:
            return None
        raise


def gaps_of(turn: StoredTurn, weights: Weights) -> list[float] | None:
    """The teacher's log-prob minus the policy's for each token, where the method asks and a hint is there."""
    if weights.topk is not None or not is_hinted(turn) or not weights.opd:
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


def is_hinted(turn: StoredTurn) -> bool:
    return turn.sample in (SampleKind.OPD, SampleKind.OPD_RL)


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
