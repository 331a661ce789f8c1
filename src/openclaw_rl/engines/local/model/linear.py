"""A product with a weight, which may be stored in 4 or 8 bits.

A product turns codes into numbers of the activations' precision first, in sampler and learner alike: the base stays as
it is stored, and its memory too. This is plain PyTorch on a CPU, where it is as fast as bitsandbytes, and a kernel on
CUDA.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from openclaw_rl.engines.local.model import ops
from openclaw_rl.engines.local.model.codes import can_be_encoded, encode
from openclaw_rl.engines.local.model.codes import decode as decode_anywhere


@dataclass(slots=True)
class Linear:
    """A projection's weight [out, in] and optional bias."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def input_gradient(self, grad: Tensor) -> Tensor:
        """The gradient of the input, from that of the result."""
        return ops.linear_backward(grad, self.weight)


@dataclass(slots=True, kw_only=True)
class QuantisedLinear(Linear):
    """A projection whose weight is stored in codes: int8 [out, in], or two of 4 bits in each byte [out, in / 2]."""

    scales: Tensor
    """float32: [out, 1], or [out, in / GROUP]"""
    dtype: torch.dtype
    """In which it is computed."""

    def __call__(self, x: Tensor) -> Tensor:
        if x.is_cuda:
            from openclaw_rl.engines.local.model import quantised_kernels

            if len(x) <= quantised_kernels.MAX_ROWS:
                return quantised_kernels.product(x, self.weight, self.scales, self.bias)
        return ops.linear(x, self.dense(), self.bias)

    def input_gradient(self, grad: Tensor) -> Tensor:
        return ops.linear_backward(grad, self.dense())

    def dense(self) -> Tensor:
        """The weight as numbers, for one product."""
        return decode(self.weight, self.scales, self.dtype)


def quantised(weight: Tensor, bias: Tensor | None, bits: int, dtype: torch.dtype) -> Linear:
    """A projection with a weight of so many bits, if it has any and its size allows that."""
    if not can_be_encoded(weight, bits):
        return Linear(weight.to(dtype), bias)
    codes, scales = encode(weight, bits)
    return QuantisedLinear(codes, bias, scales=scales, dtype=dtype)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight [..., in] that codes and scales stand for."""
    if not codes.is_cuda:
        return decode_anywhere(codes, scales, dtype)
    from openclaw_rl.engines.local.model import quantised_kernels

    return quantised_kernels.decode(codes, scales, dtype)
