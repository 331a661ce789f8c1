"""How a family attends, and the attention of a sequence's last tokens in PyTorch, for any device and dtype."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: Where scores exist as a tensor, they are those of so many queries at a time.
QUERIES_BLOCK = 512


class AttentionForm(NamedTuple):
    """What distinguishes a layer's attention from the plain one."""

    scale: float | None = None
    """Of the scores; None: 1 / √dim."""
    window: int | None = None
    """A token attends to so many tokens, itself among them; None: to all before it."""
    softcap: float | None = None
    """Scores stay below this, by tanh."""
    sinks: Tensor | None = None
    """[query heads]: the score of a key without a value."""


PLAIN = AttentionForm()


def attend_last(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm = PLAIN) -> Tensor:
    """Attention of the last tokens of a sequence to all of it, up to themselves.

    [tokens, heads, dim] → [tokens, query heads * dim], with gradients. Values may have another dim than keys.
    """
    if form.window is not None:
        first = max(0, len(k) - len(q) - form.window + 1)
        k, v = k[first:], v[first:]
        if len(k) <= form.window:
            # Without a mask, PyTorch's fast kernels can be used.
            form = form._replace(window=None)
    q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
    if form.softcap is None and form.sinks is None:
        mask = None
        if q.shape[2] > 1 and (q.shape[2] < k.shape[2] or form.window is not None):
            mask = visible(q.shape[2], k.shape[2], form.window, q.device)
        causal = mask is None and q.shape[2] > 1
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=form.scale, enable_gqa=True)
    else:
        out = _attend_in_blocks(q, k, v, form)
    return out[0].transpose(0, 1).flatten(1)


def visible(count: int, length: int, window: int | None, device: torch.device) -> Tensor:
    """[count, length]: which of `length` tokens each of the last `count` attends to."""
    before = length - count
    mask = torch.ones(count, length, dtype=torch.bool, device=device).tril_(before)
    return mask if window is None else mask.triu_(before - window + 1)


def _attend_in_blocks(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm) -> Tensor:
    """In the backward pass a block's scores are computed again, so that those of one block exist at a time."""
    mask = visible(q.shape[2], k.shape[2], form.window, q.device)
    blocks = zip(torch.split(q, QUERIES_BLOCK, dim=2), torch.split(mask, QUERIES_BLOCK), strict=True)
    checkpointing: Any = {"use_reentrant": False, "preserve_rng_state": False}
    if not torch.is_grad_enabled():
        return torch.cat([_attend_by_scores(part, k, v, rows, form) for part, rows in blocks], dim=2)
    return torch.cat(
        [checkpoint(_attend_by_scores, part, k, v, rows, form, **checkpointing) for part, rows in blocks], dim=2
    )


def _attend_by_scores(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, form: AttentionForm) -> Tensor:
    """With the scores as a tensor: [1, heads, tokens, dim] → [1, query heads, queries, dim]."""
    grouped = q.view(1, k.shape[1], -1, *q.shape[2:])
    scale = q.shape[-1] ** -0.5 if form.scale is None else form.scale
    scores = grouped @ k.unsqueeze(2).transpose(-1, -2) * scale
    if form.softcap is not None:
        scores = torch.tanh(scores / form.softcap) * form.softcap
    scores = scores.masked_fill(~mask, float("-inf"))
    if form.sinks is not None:
        sinks = form.sinks.to(scores.dtype).view(1, k.shape[1], -1, 1, 1)
        scores = torch.cat([scores, sinks.expand(*scores.shape[:-1], 1)], dim=-1)
    exact = torch.promote_types(scores.dtype, torch.float32)
    weights = scores.softmax(-1, dtype=exact)[..., : k.shape[2]].to(v.dtype)
    out: Tensor = (weights @ v.unsqueeze(2)).flatten(1, 2)
    return out
