"""Log-probs of chosen tokens, in chunks: only a few rows of logits over the whole vocabulary exist at a time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

#: The most memory for the logits of one chunk, in float32. With this many rows, reading the head's weights is not the
#: bottleneck.
MAX_CHUNK_BYTES = 128 << 20


def rows_in_chunk(vocabulary: int) -> int:
    """How many rows of logits exist at a time."""
    return max(1, MAX_CHUNK_BYTES // (4 * vocabulary))


def chunked_logprobs(
    hidden: Tensor, head: Tensor | Callable[[Tensor], Tensor], targets: Tensor, chunk: int | None = None
) -> Tensor:
    """Log-probs, at least in float32, of `targets` after `hidden` [rows, width] under `head` [vocabulary, width].

    The head may also be a function that computes logits; then `chunk`, the number of rows whose logits exist at a time,
    must be given. Targets are [rows] or [rows, n]: several for each row.
    """
    if targets.dim() == 1:
        return chunked_logprobs(hidden, head, targets[:, None], chunk).squeeze(1)
    if chunk is None:
        assert isinstance(head, Tensor)
        chunk = rows_in_chunk(len(head))
    if not isinstance(head, Tensor) or (head.requires_grad and torch.is_grad_enabled()):
        # The gradient needs the probabilities again in the backward pass.
        parts = [slice(start, start + chunk) for start in range(0, len(hidden), chunk)]
        checkpointing: Any = {"use_reentrant": False, "preserve_rng_state": False}
        return torch.cat(
            [checkpoint(unchunked_logprobs, hidden[part], head, targets[part], **checkpointing) for part in parts]
        )
    logprobs: Tensor = _ChunkedLogprobs.apply(hidden, head, targets, chunk)  # type: ignore[no-untyped-call]
    return logprobs


def unchunked_logprobs(hidden: Tensor, head: Tensor | Callable[[Tensor], Tensor], targets: Tensor) -> Tensor:
    logits = F.linear(hidden.to(head.dtype), head).float() if isinstance(head, Tensor) else head(hidden)
    return logits.gather(1, targets) - logits.logsumexp(dim=-1, keepdim=True)


class _ChunkedLogprobs(torch.autograd.Function):
    """For a frozen head: the gradient of a log-prob is the token's row of the head minus the mean row.

    The mean row, weighted by the probabilities, has the size of the hidden state. It is computed in the forward pass
    while the probabilities exist, so that the backward pass does not compute them again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, chunk: int) -> Tensor:
        logprobs = torch.empty(targets.shape, dtype=torch.float32, device=hidden.device)
        means = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        for start in range(0, len(hidden), chunk):
            rows = slice(start, start + chunk)
            logits = F.linear(hidden[rows].to(head.dtype), head).float()
            top = logits.amax(dim=-1, keepdim=True)
            chosen = logits.gather(1, targets[rows]) - top
            weights = logits.sub_(top).exp_()
            total = weights.sum(dim=-1, keepdim=True)
            logprobs[rows] = chosen - total.log()
            if means is not None:
                # Dividing the product is cheaper than dividing the weights, which are as wide as the vocabulary.
                means[rows] = (weights.to(head.dtype) @ head).div_(total)
        ctx.save_for_backward(means, targets)
        ctx.head = head
        ctx.chunk = chunk
        return logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        means, targets = ctx.saved_tensors
        grad = torch.empty_like(means)
        for start in range(0, len(means), ctx.chunk):
            rows = slice(start, start + ctx.chunk)
            difference = ctx.head[targets[rows]] - means[rows, None]
            grad[rows] = torch.einsum("rn,rnw->rw", grads[0][rows].to(means.dtype), difference)
        return grad, None, None, None
