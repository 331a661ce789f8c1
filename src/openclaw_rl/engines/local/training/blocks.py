"""A decoder block for training: the same result as `Decoder.forward`, differentiable, with little memory.

A projection does not keep its input. It keeps the tensor from which the input was computed (the residual stream or the
gate), which exists anyway, and computes the input again in the backward pass. Gradients go to the adapters and to the
block's input, because base weights are frozen. If all weights are trained, autograd decides what to keep.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from openclaw_rl.engines.local.model.decoder import Layer, Shape
from openclaw_rl.engines.local.model.language_model import Projection, Sizes
from openclaw_rl.engines.local.model.linear import Linear
from openclaw_rl.engines.local.training import gradients

#: attend(queries, keys, values) with [tokens, heads, dim] each → [tokens, query heads * dim], with gradients
PackedAttend = Callable[[Tensor, Tensor, Tensor], Tensor]
#: Cosines and sines of the tokens' positions.
Angles = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class LowRank:
    """The adapter of one projection."""

    down: Tensor
    """[modules * rank, in]; of experts [experts, rank, in]"""
    up: Tensor
    """[modules * rank, out] or [experts, rank, out], with the adapter's scale in it: a block for each module, and zeros
    elsewhere."""
    dropout: Callable[[Tensor], Tensor] | None = None
    """The dropout mask for an input of the adapter; the same on every call."""


class InputSource(Protocol):
    """How a projection's input is computed from the tensor that is kept."""

    def forward(self, kept: Tensor) -> Tensor: ...

    def backward(self, grad: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """(the input, the gradient of the kept tensor), from the gradient of the input."""
        ...


@dataclass(frozen=True, slots=True)
class Normed:
    weight: Tensor
    eps: float

    def forward(self, kept: Tensor) -> Tensor:
        return gradients.rms_norm(kept, self.weight, self.eps)

    def backward(self, grad: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return gradients.rms_norm_backward(grad, kept, self.weight, self.eps)


class Gated:
    def forward(self, kept: Tensor) -> Tensor:
        return gradients.silu_mul(kept)

    def backward(self, grad: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return gradients.silu_mul_backward(grad, kept)


class Itself:
    def forward(self, kept: Tensor) -> Tensor:
        return kept

    def backward(self, grad: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        return kept, grad


def block(
    shape: Shape,
    layer: Layer,
    adapters: Mapping[Projection, LowRank],
    residual: Tensor,
    angles: Angles | None,
    attend: PackedAttend,
    rows: Tensor | None = None,
) -> Tensor:
    """The residual stream after a layer; `angles` is None for a layer without rotary positions.

    With `rows`, only these tokens are computed after attention: the last layer needs no others.
    """
    qkv = project(Normed(layer.input_norm, shape.eps), residual, layer.qkv, adapters.get("qkv"))
    attended = attend(*split_heads(shape, layer, qkv, angles))
    if rows is not None:
        attended = attended.index_select(0, rows)
        residual = residual.index_select(0, rows)
    residual = residual + project(Itself(), attended, layer.o, adapters.get("o"))
    gate_up = project(Normed(layer.post_norm, shape.eps), residual, layer.gate_up, adapters.get("gate_up"))
    return residual + project(Gated(), gate_up, layer.down, adapters.get("down"))


def no_adapters(shape: Sizes) -> list[dict[Projection, LowRank]]:
    """The base model: no adapter in any layer."""
    return [{} for _ in range(shape.layers)]


def project(source: InputSource, kept: Tensor, linear: Linear, adapter: LowRank | None) -> Tensor:
    """A projection of the input that `source` computes, with its adapter if it has one."""
    if linear.weight.requires_grad:
        return linear(source.forward(kept))
    factors = () if adapter is None else (adapter.down, adapter.up)
    y: Tensor = _Project.apply(kept, source, linear, adapter, *factors)  # type: ignore[no-untyped-call]
    return y


def split_heads(shape: Shape, layer: Layer, qkv: Tensor, angles: Angles | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values. Queries and keys are normalised if the model family does so, and rotated."""
    counts = (shape.heads, shape.kv_heads, shape.kv_heads)
    heads = qkv.view(-1, sum(counts), shape.head_dim)
    norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
    if angles is not None and layer.qkv.weight.requires_grad:
        q, k, v = gradients.turn_heads(heads, counts, *angles, norms, shape.eps).split_with_sizes(counts, dim=1)
    elif angles is None:
        q, k, v = heads.split_with_sizes(counts, dim=1)
    else:
        q, k, v = _Turn.apply(heads, counts, angles, norms, shape.eps)  # type: ignore[no-untyped-call]
    return q, k, v


class _Project(torch.autograd.Function):
    """The adapter's factors are separate arguments, because autograd sees only tensors that are arguments."""

    @staticmethod
    def forward(
        ctx: Any, kept: Tensor, source: InputSource, linear: Linear, adapter: LowRank | None, *_factors: Tensor
    ) -> Tensor:
        x = source.forward(kept)
        y = linear(x)
        inner = None if adapter is None else dropped(x, adapter) @ adapter.down.t()
        if adapter is not None and inner is not None:
            y.addmm_(inner, adapter.up)
        ctx.save_for_backward(kept, inner)
        ctx.source = source
        ctx.linear = linear
        ctx.adapter = adapter
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        kept, inner = ctx.saved_tensors
        (grad,) = grads
        adapter: LowRank | None = ctx.adapter
        if adapter is None:
            return ctx.source.backward(ctx.linear.input_gradient(grad), kept)[1], None, None, None
        grad_inner = grad @ adapter.up.t()
        grad_up = inner.t() @ grad
        if ctx.needs_input_grad[0]:
            grad_x = ctx.linear.input_gradient(grad)
            add_dropped(grad_x, grad_inner, adapter)
            x, grad_kept = ctx.source.backward(grad_x, kept)
        else:
            x = ctx.source.forward(kept)
            grad_kept = None
        return grad_kept, None, None, None, grad_inner.t() @ dropped(x, adapter), grad_up


def dropped(x: Tensor, adapter: LowRank) -> Tensor:
    """A projection's input after the adapter's dropout."""
    return x if adapter.dropout is None else x * adapter.dropout(x)


def add_dropped(grad_x: Tensor, grad_inner: Tensor, adapter: LowRank) -> None:
    """Add the adapter's part to the gradient of the input, in place."""
    if adapter.dropout is None:
        grad_x.addmm_(grad_inner, adapter.down)
    else:
        grad_x.add_((grad_inner @ adapter.down) * adapter.dropout(grad_x))


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        heads: Tensor,
        counts: tuple[int, int, int],
        angles: Angles,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(heads if norms else None)
        ctx.angles = angles
        ctx.norms = norms
        ctx.eps = eps
        cos, sin = angles
        return gradients.turn_heads(heads, counts, cos, sin, norms, eps).split_with_sizes(counts, dim=1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        (heads,) = ctx.saved_tensors
        grad_q, grad_k, grad_v = grads
        cos, sin = ctx.angles
        grad = gradients.turn_heads_backward((grad_q, grad_k, grad_v), heads, cos, sin, ctx.norms, ctx.eps)
        return grad, None, None, None, None
