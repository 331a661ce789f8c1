"""The Triton kernels against their plain PyTorch reference.

Runs compiled where there is a GPU and in Triton's interpreter where there is none. The interpreter
must be chosen before Triton is first imported, hence the order of the imports.
"""

import os
import sys

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

from openclaw_rl.engines.local.model import kernels, ops  # noqa: E402
from openclaw_rl.engines.local.sampling import paged_attention  # noqa: E402

# The interpreter truncates to bfloat16 where hardware rounds, so that dtype is compared on a GPU only.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
EPS = 1e-6
PAGE_SIZE = 16
# Attention is held to fp32 arithmetic, so what it may miss by is the rounding of weights and output.
ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
# Fused arithmetic may cross a rounding boundary: one unit in the last place, near zero a little more.
ROUNDING = {
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-3},
    torch.float16: {"rtol": 1e-3, "atol": 1e-4},
}


@pytest.fixture
def device() -> str:
    return DEVICE


def random(*shape: int, device: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device=device, dtype=dtype)


def angles(tokens: int, half: int, device: str) -> tuple[Tensor, Tensor]:
    phase = random(tokens, half, device=device, seed=9) * 10
    return phase.cos(), phase.sin()


def fused_qkv(tokens: int, heads: list[int], dim: int, device: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """A projection's output and its query, key and value views, none of which owns its rows."""
    buffer = random(tokens, sum(heads) * dim, device=device, dtype=dtype)
    return buffer, [part.view(tokens, -1, dim) for part in buffer.split([n * dim for n in heads], dim=1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 16), (3, 100), (5, 2560), (2, 8192), (4, 1)])
def test_rms_norm(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    x = random(tokens, width + 3, device=device, dtype=dtype)[:, :width]
    weight = random(width, device=device, dtype=dtype, seed=1)
    assert_close(kernels.rms_norm(x, weight, EPS), ops.rms_norm(x, weight, EPS), **ROUNDING[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (7, 1000), (2, 2560), (2, 8192)])
def test_add_rms_norm(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    x = random(tokens, 2 * width, device=device, dtype=dtype)[:, width:]
    residual = random(tokens, width, device=device, dtype=dtype, seed=1) * 30
    weight = random(width, device=device, dtype=dtype, seed=2)
    kept = residual.clone()
    normed, total = kernels.add_rms_norm(x, residual, weight, EPS)
    expected_normed, expected_total = ops.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, expected_total)
    assert torch.equal(residual, kept)
    assert_close(normed, expected_normed, **ROUNDING[dtype])


def test_add_rms_norm_norms_the_rounded_sum(device: str) -> None:
    x, residual = (random(4, 2048, device=device, dtype=torch.float16, seed=seed) for seed in (0, 1))
    weight = random(2048, device=device, dtype=torch.float16, seed=2)
    normed, total = kernels.add_rms_norm(x, residual * 30, weight, EPS)
    # Norming the unrounded sum would move a good part of the elements by one unit.
    assert (normed != kernels.rms_norm(total, weight, EPS)).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "width"), [(1, 1), (3, 37), (2, 1024), (4, 2500)])
def test_silu_mul(tokens: int, width: int, dtype: torch.dtype, device: str) -> None:
    gate_up = random(tokens, 2 * width + 5, device=device, dtype=dtype)[:, : 2 * width] * 8
    assert_close(kernels.silu_mul(gate_up), ops.silu_mul(gate_up), **ROUNDING[dtype])


@pytest.mark.parametrize("extreme", [-200.0, 200.0])
def test_silu_mul_saturates(extreme: float, device: str) -> None:
    gate_up = torch.full((1, 8), extreme, device=device)
    assert_close(kernels.silu_mul(gate_up), ops.silu_mul(gate_up))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 16), (3, 5, 80), (2, 32, 128), (5, 9, 64), (1, 3, 256)])
def test_norm_rotate(tokens: int, heads: int, dim: int, normed: bool, dtype: torch.dtype, device: str) -> None:
    buffer, (_, turned, _) = fused_qkv(tokens, [2, heads, 1], dim, device, dtype)
    cos, sin = angles(tokens, dim // 2, device)
    weight = random(dim, device=device, dtype=dtype, seed=3) if normed else None
    expected = buffer.clone()
    source = turned if weight is None else ops.rms_norm(turned, weight, EPS)
    expected.view(tokens, -1, dim)[:, 2 : 2 + heads] = ops.rotate(source, cos, sin).to(dtype)
    kernels.norm_rotate(turned, cos, sin, weight, EPS)
    assert_close(buffer, expected, **ROUNDING[dtype])
    untouched = [*range(2), 2 + heads]
    assert torch.equal(buffer.view(tokens, -1, dim)[:, untouched], expected.view(tokens, -1, dim)[:, untouched])


def test_norm_rotate_returns_what_it_overwrote(device: str) -> None:
    heads = random(2, 3, 16, device=device)
    cos, sin = angles(2, 8, device)
    expected = ops.rotate(heads, cos, sin)
    turned = kernels.norm_rotate(heads, cos, sin, None, EPS)
    assert turned is heads
    assert_close(turned, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 16), (6, 2, 64), (5, 9, 80), (3, 8, 128)])
def test_store_kv(tokens: int, heads: int, dim: int, dtype: torch.dtype, device: str) -> None:
    _, (_, k, v) = fused_qkv(tokens, [heads + 1, heads, heads], dim, device, dtype)
    k_pages = random(4, PAGE_SIZE, heads, dim, device=device, dtype=dtype, seed=4)
    v_pages = random(4, PAGE_SIZE, heads, dim, device=device, dtype=dtype, seed=5)
    slots = torch.randperm(4 * PAGE_SIZE, generator=torch.Generator().manual_seed(6))[:tokens].to(device)
    slots[1::3] = -1
    written = slots >= 0
    expected_k, expected_v = k_pages.clone(), v_pages.clone()
    expected_k.view(-1, heads, dim)[slots[written]] = k[written]
    expected_v.view(-1, heads, dim)[slots[written]] = v[written]
    paged_attention.store_kv(k, v, k_pages, v_pages, slots)
    assert torch.equal(k_pages, expected_k)
    assert torch.equal(v_pages, expected_v)


def paged_cache(
    lengths: list[int], kv_heads: int, dim: int, device: str, dtype: torch.dtype, spare: int = 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Shuffled pages holding random tokens; every slot no sequence owns is NaN, every unused page id wild."""
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    shuffled = torch.randperm(sum(counts) + spare, generator=torch.Generator().manual_seed(7)).tolist()
    pages = torch.full((2, len(shuffled), PAGE_SIZE, kv_heads, dim), torch.nan, device=device, dtype=dtype)
    table = torch.full((len(lengths), max(counts) + 2), 2**30, dtype=torch.int32)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        owned = [shuffled.pop() for _ in range(count)]
        table[row, :count] = torch.tensor(owned, dtype=torch.int32)
        tokens = random(2, count * PAGE_SIZE, kv_heads, dim, device=device, dtype=dtype, seed=row)
        tokens[:, length:] = torch.nan
        pages[:, owned] = tokens.view(2, count, PAGE_SIZE, kv_heads, dim)
    return pages[0], pages[1], table.to(device)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attention of one query [heads, dim] over [tokens, kv heads, dim], in fp32."""
    group = q.shape[0] // k.shape[1]
    k, v = (side.float().repeat_interleave(group, dim=1) for side in (k, v))
    shares = torch.einsum("hd,thd->ht", q.float(), k).mul(scale).softmax(dim=-1)
    return torch.einsum("ht,thd->hd", shares, v)


def check_paged_decode(lengths: list[int], heads: tuple[int, int], dim: int, device: str, dtype: torch.dtype) -> None:
    """Compare `paged_decode` for `heads` = (query heads, kv heads) with dense attention, row by row."""
    query_heads, kv_heads = heads
    k_pages, v_pages, table = paged_cache(lengths, kv_heads, dim, device, dtype)
    _, (q, _) = fused_qkv(len(lengths), [query_heads, 2 * kv_heads], dim, device, dtype)
    counted = torch.tensor(lengths, dtype=torch.int32, device=device)
    out = paged_attention.paged_decode(q, k_pages, v_pages, table, counted, dim**-0.5)
    assert out.dtype == dtype
    assert out.shape == (len(lengths), query_heads, dim)
    for row, length in enumerate(lengths):
        owned = table[row, : -(-length // PAGE_SIZE)].long()
        k, v = (pages[owned].flatten(0, 1)[:length] for pages in (k_pages, v_pages))
        tolerance = ATTENTION_TOLERANCE[dtype]
        assert_close(out[row].float(), attend(q[row], k, v, dim**-0.5), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(2, 2), (3, 1), (8, 2), (16, 2), (24, 1)])
def test_paged_decode_groups_heads(heads: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    check_paged_decode([70, 0, 1, 129], heads, 64, device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 80, 128, 256])
def test_paged_decode_head_sizes(dim: int, dtype: torch.dtype, device: str) -> None:
    check_paged_decode([33, 97], (4, 1), dim, device, dtype)


@pytest.mark.parametrize(
    "lengths",
    [
        [0],
        [1],
        [0, 0, 0],
        [15, 16, 17, 31, 32, 33],
        [63, 64, 65, 127, 128, 129],
        [2500, 3, 0, 640],
        [5] * 20,
    ],
)
def test_paged_decode_lengths(lengths: list[int], device: str) -> None:
    check_paged_decode(lengths, (8, 2), 64, device, torch.float32)


def test_paged_decode_survives_large_scores(device: str) -> None:
    k_pages, v_pages, table = paged_cache([40], 1, 64, device, torch.float32)
    q = random(1, 4, 64, device=device)
    out = paged_attention.paged_decode(q, k_pages, v_pages, table, torch.tensor([40], device=device).int(), 100.0)
    owned = table[0, :3].long()
    k, v = (pages[owned].flatten(0, 1)[:40] for pages in (k_pages, v_pages))
    assert_close(out[0], attend(q[0], k, v, 100.0), rtol=1e-3, atol=1e-3)


def test_split_count_follows_shapes() -> None:
    assert paged_attention._split_count(batch=1, kv_heads=8, max_keys=1 << 20) == paged_attention.MAX_SPLITS
    assert paged_attention._split_count(batch=1, kv_heads=8, max_keys=64) == 1
    assert paged_attention._split_count(batch=64, kv_heads=8, max_keys=1 << 20) == 2
    assert paged_attention._split_count(batch=4096, kv_heads=8, max_keys=1 << 20) == 1


def test_strided_last_dimension_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        kernels.rms_norm(random(8, 4, device=device).T, random(8, device=device), EPS)
    pages = random(8, PAGE_SIZE, 2, 16, device=device)[::2]
    heads = random(1, 2, 16, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        paged_attention.store_kv(heads, heads, pages, pages, torch.zeros(1, dtype=torch.int64, device=device))
