"""Distillation over likely tokens: which hint teaches, which tokens it teaches about, and how much.

At each response token the policy has its k likeliest tokens, and the teacher has its own once it knows a hint. The
policy can best follow the hint under which the two sets overlap most. Log-probs are over the whole vocabulary; only
the weights are normalised within the k tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from openclaw_rl.methods.base import NoSignal
from openclaw_rl.methods.options import TopK
from openclaw_rl.types import Hint, Ids, StoredTurn, TopTokens

#: More exact than what is recorded, so that gaps and weights are as good as their numbers.
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Distilled:
    """What a turn teaches, as arrays [tokens, k]. `counts` marks the entries that count."""

    ids: Ids
    old_logprobs: Floats
    gaps: Floats
    """The teacher's log-prob minus the policy's, clipped."""
    weights: Floats
    """The policy's probabilities, normalised at each token over the entries that count."""
    counts: Mask
    hints: tuple[str, ...]
    """The candidates, the shortest first."""
    overlaps: Counts
    """[hints, tokens]: how many of the k likeliest tokens policy and teacher have in common."""
    chosen: Counts
    """[tokens]: the index of the hint that teaches each token."""
    left_out: int
    """Tokens of the response about which the teacher's engine said too little."""

    def chosen_shares(self) -> list[float]:
        """The share of the tokens that each hint teaches."""
        return [float((self.chosen == hint).mean()) for hint in range(len(self.hints))]

    def common_share(self) -> float:
        """The share of likeliest tokens that policy and teacher have in common under the chosen hints."""
        return float(pick(list(self.overlaps), self.chosen).mean() / self.ids.shape[1])

    def expected(self) -> Floats:
        """The mean gap at each token that has entries that count."""
        totals: Floats = (self.weights * self.gaps).sum(1)
        return totals[self.counts.any(1)]

    def as_record(self) -> dict[str, Any]:
        """Everything in it, for a line of JSON."""
        rows = zip(self.hints, self.overlaps, self.chosen_shares(), strict=True)
        return {
            "hints": [{"text": text, "overlap": float(row.mean()), "chosen": share} for text, row, share in rows],
            "chosen": self.chosen.tolist(),
            "overlaps": self.overlaps.tolist(),
            "ids": self.ids.tolist(),
            "counts": self.counts.tolist(),
            "d": self.gaps.tolist(),
            "w": self.weights.tolist(),
        }


@dataclass(frozen=True, slots=True)
class Candidate:
    """What the teacher says under one hint."""

    text: str
    ids: Ids
    """[tokens, width]: the teacher's likeliest tokens, at least k."""
    logprobs: Floats
    of_policy_top: Floats | None
    """[tokens, k]: its log-probs of the policy's likeliest tokens; None if its engine cannot score them."""
    policy_scores: Floats | None
    """[tokens, k]: the policy's log-probs of the teacher's k likeliest tokens; None if they were not asked for."""


def distil(turn: StoredTurn, settings: TopK) -> Distilled:
    """What a turn's hints teach. Raises NoSignal if numbers are missing or not finite."""
    k = settings.k
    ids, old = table(turn.top, len(turn.response_ids), k, "the policy's likeliest tokens were not recorded")
    ids = ids[:, :k]
    old = old[:, :k]
    taught = {hint.text: hint for hint in (turn.verdict.hints if turn.verdict else ()) if hint.top is not None}
    hints = sorted(taught.values(), key=lambda hint: len(hint.text))
    candidates = [read_candidate(hint, len(ids), k) for hint in hints[: settings.candidates]]
    if not candidates:
        raise NoSignal("no teacher has looked at its likeliest tokens")
    shared = [common(ids, candidate.ids[:, :k]) for candidate in candidates]
    overlaps = np.array([mask.sum(1) for mask in shared])
    chosen = choose(overlaps, settings.selection)
    if settings.subset == "teacher":
        ids, old, theirs = of_teacher_top(candidates, chosen, k)
        counts = np.ones_like(ids, dtype=bool)
    else:
        theirs = pick([of_policy_top(candidate, ids, old, settings.clip) for candidate in candidates], chosen)
        counts = pick(shared, chosen) if settings.subset == "overlap" else np.ones_like(ids, dtype=bool)
    if turn.forced:
        counts = counts & ~np.array(turn.forced)[:, None]
    return weigh(ids, old, theirs, counts, candidates, overlaps, chosen, settings.clip)


def weigh(
    ids: Ids,
    old: Floats,
    theirs: Floats,
    counts: Mask,
    candidates: Sequence[Candidate],
    overlaps: Counts,
    chosen: Counts,
    clip: float,
) -> Distilled:
    """Gaps and weights, once hint and tokens are known. A token with one unknown number is left out whole."""
    unknown: Mask = np.any(counts & np.isnan(theirs), axis=1)
    counts = counts & ~unknown[:, None]
    gaps = np.where(counts, theirs - old, 0.0)
    if clip > 0:
        gaps = gaps.clip(-clip, clip)
    # An old log-prob of minus infinity would be a token that the policy could not have found likely.
    if not np.isfinite(np.where(counts, old, 0.0)).all() or not np.isfinite(gaps).all():
        raise NoSignal("a log-prob in it is not finite")
    return Distilled(
        ids=ids,
        old_logprobs=old,
        gaps=gaps,
        weights=softmax(old, counts),
        counts=counts,
        hints=tuple(candidate.text for candidate in candidates),
        overlaps=overlaps,
        chosen=chosen,
        left_out=int(unknown.sum()),
    )


def choose(overlaps: Counts, selection: str) -> Counts:
    """By which hint each token is taught, from overlaps [hints, tokens]; among equals the first, which is shortest."""
    tokens = overlaps.shape[1]
    if selection == "token_optimal":
        return np.asarray(overlaps.argmax(0))
    best = 0 if selection == "shortest" else int(overlaps.sum(1).argmax())
    return np.full(tokens, best)


def common(ids: Ids, others: Ids) -> Mask:
    """Which of `ids` [tokens, k] are also among the others of their token."""
    shared = np.zeros(ids.shape, dtype=bool)
    for column in others.T:
        shared |= ids == column[:, None]
    return shared


def of_policy_top(candidate: Candidate, ids: Ids, old: Floats, clip: float) -> Floats:
    """The teacher's log-probs of the policy's likeliest tokens; NaN where they cannot be known.

    Where the engine gave only the teacher's likeliest, any other token is at most as likely as the last of these. If
    already that is further from the policy's than the limit, the limit is what counts, and the bound is as good.
    """
    if candidate.of_policy_top is not None:
        return candidate.of_policy_top
    same = ids[:, :, None] == candidate.ids[:, None, :]
    given = np.where(same, candidate.logprobs[:, None, :], -np.inf).max(2)
    bound = np.broadcast_to(candidate.logprobs.min(1, keepdims=True), ids.shape)
    beyond = (clip > 0) & (bound - old <= -clip)
    return np.where(same.any(2), given, np.where(beyond, bound, np.nan))


def of_teacher_top(candidates: Sequence[Candidate], chosen: Counts, k: int) -> tuple[Ids, Floats, Floats]:
    """The teacher's likeliest tokens under the chosen hints, with the policy's and the teacher's log-probs."""
    policy_scores = [candidate.policy_scores for candidate in candidates]
    if any(scores is None for scores in policy_scores):
        raise NoSignal("the policy's log-probs of the teacher's likeliest tokens were not recorded")
    ids = pick([candidate.ids[:, :k] for candidate in candidates], chosen)
    return ids, pick(policy_scores, chosen), pick([candidate.logprobs[:, :k] for candidate in candidates], chosen)


def pick(tables: Sequence[Any], chosen: Counts) -> Any:
    """Row i of the table that was chosen for it."""
    return np.stack(tables)[chosen, np.arange(len(chosen))]


def softmax(logprobs: Floats, counts: Mask) -> Floats:
    """Probabilities that sum to 1 over what counts; 0 elsewhere."""
    highest = np.where(counts, logprobs, -np.inf).max(1, initial=-np.inf, keepdims=True)
    shares = np.where(counts, np.exp(logprobs - np.where(np.isfinite(highest), highest, 0.0)), 0.0)
    totals = shares.sum(1, keepdims=True)
    result: Floats = np.divide(shares, totals, out=np.zeros_like(shares), where=totals > 0)
    return result


def read_candidate(hint: Hint, tokens: int, k: int) -> Candidate:
    problem = "the teacher's likeliest tokens are not there for every token, or fewer than --topk-k"
    ids, logprobs = table(hint.top, tokens, k, problem)
    teacher_scores, policy_scores = (
        None if part is None else part[:, :k].astype(np.float64) for part in (hint.of_policy_top, hint.policy_scores)
    )
    if any(part is not None and part.shape != (tokens, k) for part in (teacher_scores, policy_scores)):
        raise NoSignal(problem)
    return Candidate(hint.text, ids, logprobs, teacher_scores, policy_scores)


def table(top: TopTokens | None, tokens: int, k: int, problem: str) -> tuple[Ids, Floats]:
    """Ids and log-probs of every token, at least k of each. Raises NoSignal with the problem."""
    if top is None or len(top.ids) != tokens or top.ids.shape[1] < k:
        raise NoSignal(problem)
    return top.ids, top.logprobs.astype(np.float64)
