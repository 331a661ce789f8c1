"""Drawing on the device follows `draw`: the same tokens for the same uniform numbers, and the same log-probs.

Runs compiled where there is a GPU and in Triton's interpreter where there is none, like `test_kernels`.
"""

import os
import sys

import pytest
import torch
from torch import Tensor

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported compiled: set TRITON_INTERPRET=1", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from openclaw_rl.engines.local.sampling.draw import draw  # noqa: E402
from openclaw_rl.engines.local.sampling.draw_kernels import CHUNK, draw_tokens, draw_truncated  # noqa: E402
from openclaw_rl.types import SamplingParams  # noqa: E402

pytestmark = pytest.mark.more

#: The largest number below 1 in float32.
ALMOST_ONE = 1 - 2**-24


def drawn(logits: Tensor, temperatures: list[float], uniforms: list[float]) -> tuple[list[int], list[float]]:
    columns = torch.tensor([temperatures, uniforms], device=logits.device)
    tokens, bits = draw_tokens(logits, *columns)
    return tokens.tolist(), bits.view(torch.float32).tolist()


@pytest.mark.parametrize("vocabulary", [2, 100, CHUNK, CHUNK + 1, 3 * CHUNK + 77])
def test_draws_are_those_of_the_reference(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(12, vocabulary, generator=generator)).to(DEVICE)
    temperatures = [0.0, 1.0, 0.3, 1.9] * 3
    uniforms = [0.0, 0.0, 0.0, 0.0, *torch.rand(4, generator=generator).tolist(), *[0.97] * 4]
    tokens, logprobs = drawn(logits, temperatures, uniforms)
    params = [SamplingParams(max_tokens=1, temperature=t) for t in temperatures]
    expected = draw(logits, params, uniforms)
    assert tokens == expected.tokens
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-5)


#: (temperature, top-p, top-k)
LIMITS = [(1.0, 0.9, 0), (0.7, 0.5, 0), (1.3, 0.999, 0), (1.0, 1.0, 7), (1.0, 0.8, 40), (0.5, 1e-60, 0), (2.0, 1.0, 1)]


def truncated(logits: Tensor, limits: list[tuple[float, float, int]], uniforms: list[float]) -> list[int]:
    temperatures, top_ps, top_ks = zip(*limits, strict=True)
    columns = torch.tensor([temperatures, uniforms, top_ps], device=logits.device)
    ks = torch.tensor(top_ks, dtype=torch.int32, device=logits.device) if any(top_ks) else None
    tokens, bits = draw_truncated(logits, *columns, ks)
    expected = logits.float().log_softmax(-1).gather(1, tokens.long()[:, None])[:, 0]
    assert bits.view(torch.float32).tolist() == pytest.approx(expected.tolist(), abs=1e-5)
    return tokens.tolist()


@pytest.mark.parametrize("rounded", [False, True], ids=["all-different", "many-equals"])
@pytest.mark.parametrize("vocabulary", [5, CHUNK + 1])
def test_truncated_draws_are_those_of_the_reference(vocabulary: int, rounded: bool) -> None:
    """Rounded logits have many equals at the cut, as those in bfloat16 have."""
    generator = torch.Generator().manual_seed(vocabulary)
    limits = [(t, p, min(k, vocabulary)) for t, p, k in LIMITS] * 2
    uniforms = [0.0, *torch.rand(len(limits) - 2, generator=generator).tolist(), 0.999]
    logits = 3 * torch.randn(len(limits), vocabulary, generator=generator)
    logits = (logits.mul(4).round() / 4 if rounded else logits).to(DEVICE)
    params = [SamplingParams(max_tokens=1, temperature=t, top_p=p, top_k=k) for t, p, k in limits]
    assert truncated(logits, limits, uniforms) == draw(logits, params, uniforms).tokens


def test_without_top_k_and_in_sixteen_bits() -> None:
    """Their keys have half the bits on a GPU, where bfloat16 is as it should be."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(2)).mul(3).to(DEVICE, dtype)
    limits, uniforms = [(1.0, 0.9, 0), (0.8, 0.3, 0), (1.0, 1.0, 0)], [0.3, 0.8, 0.5]
    params = [SamplingParams(max_tokens=1, temperature=t, top_p=p) for t, p, _ in limits]
    assert truncated(logits, limits, uniforms) == draw(logits.float(), params, uniforms).tokens


def test_a_sweep_of_the_uniform_reproduces_the_distribution() -> None:
    logits = torch.tensor([0.5, -1.0, 2.0, float("-inf"), 0.0], device=DEVICE)
    points = 200
    tokens, _ = drawn(logits.expand(points, -1), [0.7] * points, [(n + 0.5) / points for n in range(points)])
    shares = torch.bincount(torch.tensor(tokens), minlength=5) / points
    assert (shares - (logits / 0.7).softmax(-1).cpu()).abs().max() < 1.01 / points
    assert shares[3] == 0


@pytest.mark.parametrize("uniform", [0.0, 0.5, ALMOST_ONE])
@pytest.mark.parametrize("only", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 5])
def test_one_possible_token_is_drawn_wherever_it_is(only: int, uniform: float) -> None:
    logits = torch.full((2, 2 * CHUNK + 9), float("-inf"), device=DEVICE)
    logits[:, only] = -7.0
    tokens, logprobs = drawn(logits, [1.0, 0.0], [uniform] * 2)
    assert tokens == [only, only]
    assert logprobs == pytest.approx([0.0, 0.0], abs=1e-6)


def test_of_equals_the_first_is_the_likeliest() -> None:
    logits = torch.zeros(1, 2 * CHUNK, device=DEVICE)
    logits[0, [7, CHUNK + 3]] = 4.0
    assert drawn(logits, [0.0], [0.9])[0] == [7]


def test_a_very_low_temperature_draws_the_likeliest_token() -> None:
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert drawn(logits, [1e-5] * 3, [0.0, 0.5, ALMOST_ONE])[0] == logits.argmax(-1).tolist()


def test_logits_of_sixteen_bits_have_logprobs_of_thirty_two() -> None:
    logits = torch.randn(1, 3000, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.float16)
    tokens, logprobs = drawn(logits, [0.0], [0.0])
    assert logprobs == pytest.approx([logits.float().log_softmax(-1)[0, tokens[0]].item()], abs=1e-5)
