"""Log-probs of given tokens without the scores of all others: a vocabulary's width is held for a few rows at a time."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: What one chunk's scores may take, in float32. Enough rows that reading the head's weights is not the bottleneck.
CHUNK_BYTES = 128 << 20


def chunked_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, chunk: int | None = None) -> Tensor:
    """Log-probs, in float32, of `targets` after `hidden` [rows, width] under `head` [vocabulary, width].

    Targets are [rows] or [rows, n]: several for each row. `chunk` is the number of rows whose scores exist at one time.
    """
    if targets.dim() == 1:
        return chunked_logprobs(hidden, head, targets[:, None], chunk).squeeze(1)
    rows = chunk or max(1, CHUNK_BYTES // (4 * len(head)))
    if head.requires_grad and torch.is_grad_enabled():
        # The head's own gradient needs the probabilities a second time.
        parts = [slice(start, start + rows) for start in range(0, len(hidden), rows)]
        again: Any = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat([checkpoint(whole_logprobs, hidden[own], head, targets[own], **again) for own in parts])
    logprobs: Tensor = _ChunkedLogprobs.apply(hidden, head, targets, rows)  # type: ignore[no-untyped-call]
    return logprobs


def whole_logprobs(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    scores = F.linear(hidden, head).float()
    return scores.gather(1, targets) - scores.logsumexp(dim=-1, keepdim=True)


class _ChunkedLogprobs(torch.autograd.Function):
    """For a frozen head: the gradient of a log-prob is its token's row of it less the mean row under the distribution.

    That mean is as small as the hidden state, so it is computed while the probabilities are there, and nothing has
    to be computed again in the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, chunk: int) -> Tensor:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        means = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            scores = F.linear(hidden[rows], head).float()
            top = scores.amax(dim=-1, keepdim=True)
            chosen = scores.gather(1, targets[rows]) - top
            weights = scores.sub_(top).exp_()
            total = weights.sum(dim=-1, keepdim=True)
            logprobs[rows] = chosen - total.log()
            if means is not None:
                # Divided after the product, which is narrow.
                means[rows] = (weights.to(head.dtype) @ head).div_(total)
        ctx.save_for_backward(means, targets)
        ctx.head, ctx.chunk = head, chunk
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        means, targets = ctx.saved_tensors
        grad = torch.empty_like(means)
        for start in range(0, len(means), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            apart = ctx.head[targets[rows]] - means[rows, None]
            grad[rows] = torch.einsum("rn,rnw->rw", grads[0][rows].to(means.dtype), apart)
        return grad, None, None, None
