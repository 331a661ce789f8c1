"""Drawing tokens from logits, a whole batch at once, each row with its own parameters and random number.

A row's draw depends on its own logits and its own uniform number alone, never on what else is in the batch:
the token is where that number falls in the row's cumulative distribution.
A constraint makes tokens impossible before temperature, top-k and top-p apply. It does not change log-probs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from openclaw_rl.types import SamplingParams

#: How many of the likeliest tokens are sorted to find a nucleus; only when they do not fill it are all sorted.
NUCLEUS_CANDIDATES = 512


#: Anything colder is greedy: logits divided by it would leave float32's range.
MIN_TEMPERATURE = 1e-5

#: A way to draw: (logits, parameters, uniforms) of some rows → their tokens.
Kind = Callable[[Tensor, list[SamplingParams], list[float]], Tensor]


@dataclass(frozen=True, slots=True)
class Draws:
    """Per row: the drawn token, its raw log-prob, and the likeliest tokens if they were asked for."""

    tokens: list[int]
    logprobs: list[float]
    top: list[tuple[tuple[int, float], ...]]


def is_truncated(params: SamplingParams) -> bool:
    """Whether some tokens are too unlikely to be drawn."""
    return params.temperature >= MIN_TEMPERATURE and (params.top_p < 1 or params.top_k > 0)


def draw(
    logits: Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
    masks: Mapping[int, NDArray[np.bool_]] | None = None,
) -> Draws:
    """Draw one token per row from float32 logits [rows, vocabulary]; `uniforms` are in [0, 1).

    `masks`: the tokens that are allowed in a row, for rows that are constrained.
    """
    tokens = torch.empty(len(params), dtype=torch.long, device=logits.device)
    possible = _masked(logits, masks) if masks else logits
    for kind, rows in _by_kind(params).items():
        whole = len(rows) == len(params)
        part = possible if whole else possible[rows]
        chosen = kind(part, [params[row] for row in rows], [uniforms[row] for row in rows])
        if whole:
            tokens = chosen
        else:
            tokens[rows] = chosen
    logprobs = logits.gather(1, tokens[:, None]) - logits.logsumexp(-1, keepdim=True)
    return Draws(tokens.tolist(), logprobs[:, 0].tolist(), _top(logits, params))


def _masked(logits: Tensor, masks: Mapping[int, NDArray[np.bool_]]) -> Tensor:
    """A copy of the logits, with minus infinity where a row's mask is false."""
    rows = list(masks)
    allowed = torch.from_numpy(np.stack([masks[row] for row in rows])).to(logits.device)
    possible = logits.clone()
    possible[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return possible


def _by_kind(params: Sequence[SamplingParams]) -> dict[Kind, list[int]]:
    kinds: dict[Kind, list[int]] = {}
    for row, p in enumerate(params):
        if p.temperature < MIN_TEMPERATURE:
            kind = _greedy
        elif is_truncated(p):
            kind = _truncated
        else:
            kind = _tempered
        kinds.setdefault(kind, []).append(row)
    return kinds


def _greedy(logits: Tensor, params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    return logits.argmax(-1)


def _tempered(logits: Tensor, params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    probs = (logits / _column([p.temperature for p in params], logits)).softmax(-1)
    return _invert(probs, uniforms)


def _truncated(logits: Tensor, params: list[SamplingParams], uniforms: list[float]) -> Tensor:
    """Apply top_k first, then top_p to the tokens that are left, as other engines do.

    Those that stay are in the order of their ids, as without these limits.
    """
    scaled = logits / _column([p.temperature for p in params], logits)
    vocabulary = logits.shape[1]
    candidates = min(vocabulary, max(NUCLEUS_CANDIDATES, *(p.top_k for p in params)))
    limits = torch.tensor([p.top_k or vocabulary for p in params], device=logits.device)[:, None]
    top_p = _column([p.top_p for p in params], logits)
    values, ids = _ranked(scaled, scaled.topk(candidates).indices)
    # Which of several equal values at the last place are candidates is arbitrary: only values above them are certain.
    probs = (values - scaled.logsumexp(-1, keepdim=True)).exp()
    certain = values > values[:, -1:]
    enough = (certain.sum(-1, keepdim=True) >= limits) | ((probs * certain).sum(-1, keepdim=True) >= top_p)
    if candidates < vocabulary and not bool(enough.all()):
        values, ids = scaled.sort(descending=True, stable=True)
        probs = (values - scaled.logsumexp(-1, keepdim=True)).exp()
    rank = torch.arange(probs.shape[1], device=logits.device)
    probs = probs * (rank < limits)
    kept_mass = torch.where(limits < vocabulary, probs.sum(-1, keepdim=True), 1.0)
    before = probs.cumsum(-1) - probs
    probs = probs * ((before < top_p * kept_mass) | (rank == 0))
    ids, order = ids.sort()
    return ids.gather(1, _invert(probs.gather(1, order), uniforms)[:, None])[:, 0]


def _ranked(scaled: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """These tokens of each row and their values, likeliest first, equals by id."""
    ids = ids.sort().values
    values, order = scaled.gather(1, ids).sort(descending=True, stable=True)
    return values, ids.gather(1, order)


def _invert(weights: Tensor, uniforms: list[float]) -> Tensor:
    """The index where each row's uniform falls in its (unnormalised) cumulative weights."""
    cumulative = weights.cumsum(-1)
    points = _column(uniforms, weights) * cumulative[:, -1:]
    index = torch.searchsorted(cumulative, points, right=True)[:, 0]
    # Rounding can put the point past the end; the last token with any weight is the right one then.
    last = weights.shape[1] - 1 - weights.flip(-1).ne(0).int().argmax(-1)
    return torch.minimum(index, last)


def _column(values: list[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _top(logits: Tensor, params: Sequence[SamplingParams]) -> list[tuple[tuple[int, float], ...]]:
    most = max(p.top_logprobs for p in params)
    if not most:
        return [()] * len(params)
    values, ids = top_tokens(logits, most)
    rows = zip(ids.tolist(), values.tolist(), params, strict=True)
    return [tuple(zip(i[: p.top_logprobs], v[: p.top_logprobs], strict=True)) for i, v, p in rows]


def top_tokens(logits: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The raw log-probs of each row's likeliest tokens, and their ids."""
    values, ids = logits.topk(most)
    return values - logits.logsumexp(-1, keepdim=True), ids
