"""Causal attention over a tree of sequences that are packed into one run of tokens, with gradients.

A token attends to its own segment up to itself, and to every segment that its sequence contains before that. One call
of a fused kernel computes the former for all tokens. One call per shared segment computes the latter for all sequences
that contain it, without a mask and without copies of keys. The results are merged by their sums of exponentials. Given
the merged result and sum, the kernel's backward pass returns a call's part of the gradients; the parts are added.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from openclaw_rl.engines.local.model.attention import PLAIN, AttentionForm, attend_last
from openclaw_rl.engines.local.training.blocks import PackedAttend
from openclaw_rl.engines.local.training.packing import Segment, copied


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """Attention of some tokens of a run to some tokens of it."""

    queries: slice
    keys: slice
    query_lengths: tuple[int, ...]
    """The queries are cut into parts, and each attends to one part of the keys."""
    key_lengths: tuple[int, ...]
    causal: bool


class Kernel(Protocol):
    """Makes one call. Queries, keys and values are those of the call."""

    @property
    def call(self) -> AttentionCall: ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The result [tokens, heads, dim] and the logarithm of the sum of exponentials [heads, tokens]."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradients of queries, keys and values."""
        ...


def packed_attention(segments: Sequence[Segment], device: torch.device, dtype: torch.dtype) -> PackedAttend:
    """Attention of each token to its sequence, up to itself. [tokens, heads, dim] → [tokens, heads * dim]"""
    if device.type == "cpu":
        return merged_attention([CpuKernel(call) for call in calls(segments)])
    # ROCm is a device of type cuda too, but has another flash kernel behind the same operators.
    if device.type == "cuda" and torch.version.hip is None and dtype in (torch.float16, torch.bfloat16):
        return merged_attention([FlashKernel(call, device) for call in calls(segments)])
    return attention_by_segment(segments)


def calls(segments: Sequence[Segment]) -> list[AttentionCall]:
    """The attention of each segment to itself, then the attention to each shared segment."""
    run = slice(0, segments[-1].stop)
    lengths = tuple(segment.stop - segment.start for segment in segments)
    return [
        AttentionCall(run, run, lengths, lengths, causal=True),
        *(
            AttentionCall(slice(stop, reach), slice(start, stop), (reach - stop,), (stop - start,), causal=False)
            for start, stop, reach in segments
            if reach > stop
        ),
    ]


def merged_attention(kernels: Sequence[Kernel]) -> PackedAttend:
    """The first call has all tokens of the run as queries and keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Merged.apply(q, k, v, kernels)  # type: ignore[no-untyped-call]
        return out

    return attend


class _Merged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernels: Sequence[Kernel]) -> Tensor:
        out, logsumexp = kernels[0].forward(q, k, v)
        for kernel in kernels[1:]:
            rows = kernel.call.queries
            keys = kernel.call.keys
            other, other_logsumexp = kernel.forward(q[rows], k[keys], v[keys])
            share = torch.sigmoid(other_logsumexp - logsumexp[:, rows]).t().unsqueeze(-1)
            out[rows] = torch.lerp(out[rows].to(share.dtype), other.to(share.dtype), share).to(out.dtype)
            logsumexp[:, rows] = torch.logaddexp(logsumexp[:, rows], other_logsumexp)
        ctx.save_for_backward(q, k, v, out, logsumexp)
        ctx.kernels = kernels
        return out.flatten(1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, logsumexp = ctx.saved_tensors
        grad = grads[0].reshape(out.shape)
        first, *others = ctx.kernels
        grad_q, grad_k, grad_v = first.backward(grad, q, k, v, out, logsumexp)
        for kernel in others:
            rows = kernel.call.queries
            keys = kernel.call.keys
            parts = kernel.backward(grad[rows], q[rows], k[keys], v[keys], out[rows], logsumexp[:, rows])
            for whole, at, part in zip((grad_q, grad_k, grad_v), (rows, keys, keys), parts, strict=True):
                whole[at] += part
        return grad_q, grad_k, grad_v, None


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """PyTorch's fused kernel for the CPU, for one part of the queries at a time."""

    call: AttentionCall

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        results = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*part, 0.0, self.call.causal)
            for part in self._parts((q,), (k, v))
        ]
        return tokens_first([out for out, _ in results]), torch.cat([logsumexp[0] for _, logsumexp in results], dim=1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, ...]:
        sums = logsumexp[None].split_with_sizes(self.call.query_lengths, dim=2)
        gradients = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                part_grad, part_q, part_k, part_v, part_out, part_sums, 0.0, self.call.causal
            )
            for (part_grad, part_q, part_out, part_k, part_v), part_sums in zip(
                self._parts((grad, q, out), (k, v)), sums, strict=True
            )
        ]
        return tuple(tokens_first(parts) for parts in zip(*gradients, strict=True))

    def _parts(self, of_queries: Sequence[Tensor], of_keys: Sequence[Tensor]) -> Iterator[tuple[Tensor, ...]]:
        """The tensors of each part, [1, heads, tokens, dim]."""
        lengths = [*([self.call.query_lengths] * len(of_queries)), *([self.call.key_lengths] * len(of_keys))]
        parts = [
            tensor.transpose(0, 1)[None].split_with_sizes(sizes, dim=2)
            for tensor, sizes in zip((*of_queries, *of_keys), lengths, strict=True)
        ]
        return zip(*parts, strict=True)


def tokens_first(parts: Sequence[Tensor]) -> Tensor:
    """Parts [1, heads, tokens, dim] as one tensor [tokens, heads, dim]."""
    return torch.cat([part[0].transpose(0, 1) for part in parts])


class FlashKernel:
    """The flash kernel for CUDA, which takes all parts in one call; 16-bit dtypes only.

    These are the operators under `torch.nn.attention.varlen`, whose signature changes between releases.
    """

    def __init__(self, call: AttentionCall, device: torch.device) -> None:
        self.call = call
        lengths = (call.query_lengths, call.key_lengths)
        ends = [copied(torch.tensor([0, *accumulate(parts)], dtype=torch.int32), device) for parts in lengths]
        self._parts = (*ends, *map(max, lengths), 0.0, call.causal)
        # Stands for the state of the random generator, which dropout would need.
        self._no_state = torch.zeros(2, dtype=torch.uint64, device=device)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, logsumexp, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *self._parts, return_debug_mask=False)
        return out, logsumexp

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor
    ) -> tuple[Tensor, ...]:
        state = (self._no_state, self._no_state)
        gradients: tuple[Tensor, ...] = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, logsumexp.contiguous(), *self._parts, *state
        )
        return gradients


def attention_by_segment(segments: Sequence[Segment]) -> Callable[..., Tensor]:
    """One call per segment and copies of the keys before it, for any device, dtype and form of attention."""
    lengths = [segment.stop - segment.start for segment in segments]
    paths = [
        [i for i, other in enumerate(segments) if i == own or other.stop <= segment.start < other.reach]
        for own, segment in enumerate(segments)
    ]

    def attend(q: Tensor, k: Tensor, v: Tensor, form: AttentionForm = PLAIN) -> Tensor:
        # `split`, not slices: the gradient of a slice is a tensor as long as the whole run.
        queries, keys, values = (heads.split_with_sizes(lengths) for heads in (q, k, v))
        return torch.cat(
            [
                attend_last(query, torch.cat([keys[i] for i in path]), torch.cat([values[i] for i in path]), form)
                for query, path in zip(queries, paths, strict=True)
            ]
        )

    return attend
