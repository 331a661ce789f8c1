"""Causal attention over sequences that are packed into one run of tokens, with gradients."""

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor

from openclaw_rl.engines.local.training.blocks import PackedAttend


def packed_attention(lengths: Sequence[int], device: torch.device, dtype: torch.dtype) -> PackedAttend:
    """Attention of each token to its own sequence, up to itself. [tokens, heads, dim] → [tokens, heads * dim]"""
    fast = device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)
    return flash_attention(lengths, device) if fast else attention_by_sequence(lengths)


def attention_by_sequence(lengths: Sequence[int]) -> PackedAttend:
    """One call per sequence, for any device and dtype."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # `split`, not slices: the gradient of a slice is a tensor as long as the whole run.
        parts = (heads.split_with_sizes(list(lengths)) for heads in (q, k, v))
        return torch.cat([attend_one(*part) for part in zip(*parts, strict=True)])

    return attend


def attend_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (heads.transpose(0, 1)[None] for heads in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out[0].transpose(0, 1).flatten(1)


def flash_attention(lengths: Sequence[int], device: torch.device) -> PackedAttend:
    """One kernel for all sequences; 16-bit dtypes on CUDA."""
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
    longest = max(lengths)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # The operator under `torch.nn.attention.varlen`, whose signature changes between releases.
        out, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, bounds, bounds, longest, longest, 0.0, is_causal=True, return_debug_mask=False
        )
        return torch.flatten(out, 1)

    return attend
