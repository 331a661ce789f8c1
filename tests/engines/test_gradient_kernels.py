"""The kernels of training compute what their plain PyTorch reference computes.

Runs compiled where there is a GPU and in Triton's interpreter where there is none, like `test_kernels`.
"""

import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported compiled: set TRITON_INTERPRET=1", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from openclaw_rl.engines.local.training import gradient_kernels, gradients  # noqa: E402

pytestmark = pytest.mark.more

EPS = 1e-6
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@torch.enable_grad()
def reference(name: str, *args: Any) -> Any:
    """With gradients enabled, also on CUDA the functions are those of PyTorch."""
    return getattr(gradients, name)(*args)


@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (3, 100), (4, 2560)])
def test_rms_norm_backward(tokens: int, width: int) -> None:
    grad, x, weight = random(tokens, width), random(tokens, width, seed=1), random(width, seed=2)
    found = gradient_kernels.rms_norm_backward(grad, x, weight, EPS)
    assert_close(found, reference("rms_norm_backward", grad, x, weight, EPS), **CLOSE)


@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 37), (2, 2500)])
def test_silu_mul_backward(tokens: int, width: int) -> None:
    grad, gate_up = random(tokens, width), 4 * random(tokens, 2 * width, seed=1)
    found = gradient_kernels.silu_mul_backward(grad, gate_up)
    assert_close(found, reference("silu_mul_backward", grad, gate_up), **CLOSE)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("counts", "dim"), [((1, 1, 1), 16), ((9, 3, 3), 64), ((5, 2, 2), 80), ((32, 8, 8), 128)])
def test_heads_are_turned_forth_and_back(counts: tuple[int, int, int], dim: int, normed: bool) -> None:
    tokens = 3
    qkv, phase = random(tokens, sum(counts), dim), 10 * random(tokens, dim // 2, seed=1)
    norms = (random(dim, seed=2), random(dim, seed=3)) if normed else None
    turning = (phase.cos(), phase.sin(), norms, EPS)
    expected = reference("turn_heads", qkv, counts, *turning)
    assert_close(gradient_kernels.turn_heads(qkv, counts, *turning), expected, **CLOSE)
    grads = tuple(random(tokens, sum(counts), dim, seed=4).split_with_sizes(counts, dim=1))
    back = gradient_kernels.turn_heads_backward(grads, qkv if normed else None, *turning)
    assert_close(back, reference("turn_heads_backward", grads, qkv if normed else None, *turning), **CLOSE)
