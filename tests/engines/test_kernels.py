"""The Triton kernels against their plain PyTorch reference.

Runs compiled where there is a GPU and in Triton's interpreter where there is none. The interpreter
must be chosen before Triton is first imported, hence the order of the imports.
"""

import os
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported compiled: set TRITON_INTERPRET=1", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from openclaw_rl.engines.local.model import kernels, ops, quantised_kernels, thin_products  # noqa: E402
from openclaw_rl.engines.local.model.adapter_kernels import (  # noqa: E402
    DECODE_ROWS,
    PROMPT_ROWS,
    AdapterTiles,
    cut_tiles,
    expand,
    most_tiles,
    shrink,
)
from openclaw_rl.engines.local.model.attention import AttentionForm, attend_last  # noqa: E402
from openclaw_rl.engines.local.model.codes import NF4, encode  # noqa: E402
from openclaw_rl.engines.local.model.kernels import place_heads  # noqa: E402
from openclaw_rl.engines.local.model.linear import Linear  # noqa: E402
from openclaw_rl.engines.local.model.policy_slots import Factors  # noqa: E402
from openclaw_rl.engines.local.model.quantised_kernels import TILE  # noqa: E402
from openclaw_rl.engines.local.sampling import paged_attention  # noqa: E402
from openclaw_rl.engines.local.sampling.paged_attention import PromptRun, paged_prompts, tiles  # noqa: E402

pytestmark = pytest.mark.more

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
#: The same for sums of hundreds of products.
WIDE_ROUNDING = {dtype: {name: 10 * limit for name, limit in limits.items()} for dtype, limits in ROUNDING.items()}


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
@pytest.mark.parametrize(("normed", "rotated"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(1, (1, 1), 16), (5, (9, 3), 64), (6, (4, 2), 80), (3, (32, 8), 128)]
)
def test_place_heads(
    tokens: int, heads: tuple[int, int], dim: int, normed: bool, rotated: bool, dtype: torch.dtype, device: str
) -> None:
    """Queries in place, keys and values in the cache, padding nowhere, and nothing else changes."""
    queries, kv = heads
    buffer, (q, k, v) = fused_qkv(tokens, [queries, kv, kv], dim, device, dtype)
    turning = angles(tokens, dim // 2, device) if rotated else None
    norms = (random(dim, device=device, dtype=dtype, seed=3), random(dim, device=device, dtype=dtype, seed=8))
    pages = [random(4, PAGE_SIZE, kv, dim, device=device, dtype=dtype, seed=seed) for seed in (4, 5)]
    slots = torch.randperm(4 * PAGE_SIZE, generator=torch.Generator().manual_seed(6))[:tokens].to(device)
    slots[1::3] = -1
    expected = [turned(part, turning, norms[i] if normed else None) for i, part in enumerate((q, k))]
    cache = [side.clone() for side in pages]
    written = slots >= 0
    for side, part in zip(cache, (expected[1], v), strict=True):
        side.view(-1, kv, dim)[slots[written]] = part[written]
    kept = buffer.clone()[:, queries * dim :]
    found = place_heads(buffer, turning, norms if normed else None, EPS, *pages, slots)
    assert_close(found, expected[0], **ROUNDING[dtype])
    assert_close(pages[0], cache[0], **ROUNDING[dtype])
    assert torch.equal(pages[1], cache[1])
    untouched = torch.ones(4 * PAGE_SIZE, dtype=torch.bool)
    untouched[slots[written].cpu()] = False
    assert torch.equal(pages[0].view(-1, kv, dim)[untouched], cache[0].view(-1, kv, dim)[untouched])
    assert torch.equal(buffer[:, queries * dim :], kept)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("count", "tokens", "dim"), [(1, 1, 16), (5, 3, 80), (2, 7, 128)])
def test_heads_are_rotated_as_modelling_code_does(
    count: int, tokens: int, dim: int, dtype: torch.dtype, device: str
) -> None:
    heads = random(1, tokens, count, dim, device=device, dtype=dtype).transpose(1, 2)
    angles = random(1, tokens, dim // 2, device=device, seed=1).repeat(1, 1, 2)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    wanted, _ = apply_rotary_pos_emb(heads.float(), heads.float(), cos.float(), sin.float())
    for width in (dim, dim // 2):  # some give the angles of half a head, which both halves have
        found = kernels.rotate(heads[0], cos[0, :, :width], sin[0, :, :width])
        assert_close(found[None].float(), wanted, **ROUNDING[dtype])


def turned(heads: Tensor, turning: tuple[Tensor, Tensor] | None, norm: Tensor | None) -> Tensor:
    heads = heads.clone() if norm is None else ops.rms_norm(heads, norm, EPS)
    return heads if turning is None else ops.rotate(heads, *turning).to(heads.dtype)


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
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    paged_attention.paged_decode(q, k_pages, v_pages, table, counted, dim**-0.5, out)
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
        [70, 0, 3] * 100,
    ],
)
def test_paged_decode_lengths(lengths: list[int], device: str) -> None:
    check_paged_decode(lengths, (8, 2), 64, device, torch.float32)


@pytest.mark.parametrize(
    "form",
    [
        AttentionForm(window=1),
        AttentionForm(window=20),
        AttentionForm(softcap=2.0),
        AttentionForm(window=20, softcap=2.0, sinks=torch.linspace(-3, 3, 4)),
        AttentionForm(sinks=torch.linspace(-3, 3, 4)),
    ],
)
@pytest.mark.parametrize("lengths", [[30, 17, 0], [200, 33, 0]], ids=["whole", "split among programs"])
def test_paged_decode_in_the_forms_of_families(form: AttentionForm, lengths: list[int], device: str) -> None:
    if form.sinks is not None:
        form = form._replace(sinks=form.sinks.to(device))
    k_pages, v_pages, table = paged_cache(lengths, 2, 16, device, torch.float32)
    q = 3 * random(len(lengths), 4, 16, device=device)
    out = torch.full_like(q, torch.nan)
    counted = torch.tensor(lengths, dtype=torch.int32, device=device)
    paged_attention.paged_decode(q, k_pages, v_pages, table, counted, 0.5, out, form)
    for row, length in enumerate(lengths):
        owned = table[row, : -(-length // PAGE_SIZE)].long()
        k, v = (pages[owned].flatten(0, 1)[:length] for pages in (k_pages, v_pages))
        wanted = attend_last(q[row : row + 1], k, v, form._replace(scale=0.5)) if length else torch.zeros(64)
        assert_close(out[row].flatten().cpu(), wanted.flatten().cpu(), rtol=1e-5, atol=1e-5)


def test_paged_decode_survives_large_scores(device: str) -> None:
    k_pages, v_pages, table = paged_cache([40], 1, 64, device, torch.float32)
    q = random(1, 4, 64, device=device)
    out = torch.empty_like(q)
    paged_attention.paged_decode(q, k_pages, v_pages, table, torch.tensor([40], device=device).int(), 100.0, out)
    owned = table[0, :3].long()
    k, v = (pages[owned].flatten(0, 1)[:40] for pages in (k_pages, v_pages))
    assert_close(out[0], attend(q[0], k, v, 100.0), rtol=1e-3, atol=1e-3)


def test_split_count_follows_shapes() -> None:
    assert paged_attention._split_count(batch=1, kv_heads=8, max_keys=1 << 20) == paged_attention.MAX_SPLITS
    assert paged_attention._split_count(batch=1, kv_heads=8, max_keys=64) == 1
    assert paged_attention._split_count(batch=32, kv_heads=8, max_keys=1 << 20) == 2
    assert paged_attention._split_count(batch=64, kv_heads=8, max_keys=1 << 20) == 1
    assert paged_attention._split_count(batch=4096, kv_heads=8, max_keys=1 << 20) == 1


def test_strided_last_dimension_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="contiguous"):
        kernels.rms_norm(random(8, 4, device=device).T, random(8, device=device), EPS)
    pages = random(8, PAGE_SIZE, 2, 16, device=device)[::2]
    slots = torch.zeros(1, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="contiguous"):
        place_heads(random(1, 96, device=device), None, None, EPS, pages, pages, slots)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "dim"), [((8, 2), 64), ((9, 3), 64), ((3, 3), 80), ((24, 1), 128)])
def test_prompts_of_a_step_attend_in_one_call(
    heads: tuple[int, int], dim: int, dtype: torch.dtype, device: str
) -> None:
    """Prompts of several tiles and of part of one, with and without tokens that the cache held before."""
    starts, counts = [0, 0, 130, 37], [70, 1, 40, 3]
    check_paged_prompts(starts, counts, heads, dim, device, dtype)


@pytest.mark.parametrize(("start", "count"), [(0, 2), (64, 64), (63, 65), (500, 33)])
def test_prompts_at_the_borders_of_blocks(start: int, count: int, device: str) -> None:
    check_paged_prompts([start], [count], (4, 2), 32, device, torch.float32)


def check_paged_prompts(
    starts: list[int], counts: list[int], heads: tuple[int, int], dim: int, device: str, dtype: torch.dtype
) -> None:
    """Compare with dense attention, token by token; the places before the first prompt stay as they are."""
    before = 3
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    k_pages, v_pages, table = paged_cache(lengths, heads[1], dim, device, dtype)
    _, (q, _) = fused_qkv(before + sum(counts), [heads[0], 2 * heads[1]], dim, device, dtype)
    places = [before + sum(counts[:i]) for i in range(len(counts))]
    prompts = [PromptRun(*prompt) for prompt in zip(places, starts, counts, strict=True)]
    cut = torch.tensor(tiles(prompts, heads[0] // heads[1]), dtype=torch.int32, device=device)
    out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
    paged_prompts(q, k_pages, v_pages, table, cut, dim**-0.5, out)
    assert out[:before].isnan().all()
    tolerance = {"rtol": ATTENTION_TOLERANCE[dtype], "atol": ATTENTION_TOLERANCE[dtype]}
    for row, (place, start, count) in enumerate(zip(places, starts, counts, strict=True)):
        owned = table[row, : -(-lengths[row] // PAGE_SIZE)].long()
        k, v = (pages[owned].flatten(0, 1) for pages in (k_pages, v_pages))
        for i in range(0, count, max(1, count // 7)):
            visible = start + i + 1
            expected = attend(q[place + i], k[:visible], v[:visible], dim**-0.5)
            assert_close(out[place + i].float(), expected, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("biased", "adapted"), [(False, False), (True, True)])
@pytest.mark.parametrize(("slot", "inputs", "outputs"), [(2, 64, 6), (1, 2560, 37), (0, 1100, 8), (3, 576, 130)])
def test_thin_products(
    slot: int, inputs: int, outputs: int, biased: bool, adapted: bool, dtype: torch.dtype, device: str
) -> None:
    """With and without adapters, of which the row may have none."""
    x = random(1, inputs + 16, device=device, dtype=dtype)[:, :inputs]
    weight = random(2 * outputs, inputs, device=device, dtype=dtype, seed=1) / inputs**0.5
    bias = random(2 * outputs, device=device, dtype=dtype, seed=2) if biased else None
    gain, residual = (random(n, device=device, dtype=dtype, seed=3) for n in (inputs, 2 * outputs))
    residual = residual[None]
    linear, adapters = Linear(weight, bias), None
    base, straight = F.linear(ops.rms_norm(x, gain, EPS), weight, bias), F.linear(x, weight, bias)
    if adapted:
        factors = random_factors(3, 12, inputs, [outputs, outputs], device, dtype)
        slots = torch.tensor([slot], dtype=torch.int32, device=device)
        tiles = cut_tiles([(0, 1, slot)], DECODE_ROWS)
        table = AdapterTiles(torch.from_numpy(tiles.copy()).to(device), DECODE_ROWS)
        adapters = thin_products.RowAdapters(factors, slots, table)
        add_adapters(base, ops.rms_norm(x, gain, EPS), factors, slots)
        add_adapters(straight, x, factors, slots)
    # The order of the sums differs, so that single results are rounded to the other side.
    tolerance = {"rtol": 4 * ROUNDING[dtype]["rtol"], "atol": {torch.float32: 2e-5}.get(dtype, 4e-2)}
    assert_close(thin_products.norm_product(x, (gain, EPS), linear, adapters), base, **tolerance)
    found = thin_products.norm_gated_product(x, (gain, EPS), linear, adapters)
    assert_close(found, ops.silu_mul(base), **tolerance)
    assert_close(thin_products.product_plus(x, linear, residual, adapters), straight + residual, **tolerance)


def random_factors(slots: int, rank: int, inputs: int, outputs: list[int], device: str, dtype: torch.dtype) -> Factors:
    """Adapters of modules that share a product."""
    down = random(slots, len(outputs) * rank, inputs, device=device, dtype=dtype, seed=7) / inputs**0.5
    up = random(slots, sum(outputs), rank, device=device, dtype=dtype, seed=8) / rank**0.5
    ends = [sum(outputs[: i + 1]) for i in range(len(outputs))]
    return Factors(down, up, tuple(slice(end - size, end) for end, size in zip(ends, outputs, strict=True)))


def add_adapters(y: Tensor, x: Tensor, factors: Factors, slots: Tensor) -> None:
    """Row by row and module by module."""
    for row, slot in enumerate(slots.tolist()):
        for i, columns in enumerate(factors.columns if slot else ()):
            inner = x[row] @ factors.down[slot - 1, i * factors.rank : (i + 1) * factors.rank].t()
            y[row, columns] += factors.up[slot - 1, columns] @ inner


#: The slots of a batch's rows, which are sorted by slot: one, several, and rows without an adapter.
ROWS_BY_SLOT = {
    1: [2],
    5: [0, 0, 1, 1, 3],
    16: [0] * 3 + [1] * 13,
    33: [0] * 2 + [1] * 17 + [2] * 6 + [8] * 8,
    64: [4] * 64,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "rank", "outputs"),
    [(1, 32, [70]), (5, 8, [160, 32, 32]), (16, 16, [96, 96]), (33, 32, [130, 60, 70]), (64, 64, [40])],
)
@pytest.mark.parametrize("tile_rows", [DECODE_ROWS, PROMPT_ROWS])
def test_adapters_of_many_rows(
    rows: int, rank: int, outputs: list[int], tile_rows: int, dtype: torch.dtype, device: str
) -> None:
    """As a decode step cuts the rows into tiles, some of which stay empty, and as prompts do."""
    inputs = 600
    factors = random_factors(8, rank, inputs, outputs, device, dtype)
    slots = ROWS_BY_SLOT[rows]
    x = random(rows, inputs + 16, device=device, dtype=dtype)[:, :inputs]
    y = random(rows, sum(outputs), device=device, dtype=dtype, seed=1)
    expected = y.float().clone()
    wide = Factors(factors.down.float(), factors.up.float(), factors.columns)
    add_adapters(expected, x.float(), wide, torch.tensor(slots))
    spans = [(slots.index(slot), slots.index(slot) + slots.count(slot), slot) for slot in sorted(set(slots))]
    table = torch.zeros(3, most_tiles(rows, 8), dtype=torch.int32)
    cut = torch.from_numpy(cut_tiles(spans, tile_rows))
    table[:, : cut.shape[1]] = cut
    tiles = AdapterTiles(table.to(device), tile_rows)
    tolerance = {"rtol": 0, "atol": {torch.float32: 2e-5, torch.float16: 8e-3}.get(dtype, 6e-2)}
    inner = shrink(x, factors, tiles)
    if len(outputs) == 2:
        found = expand(y.clone(), inner, factors, tiles, gated=True)
        assert_close(found.float(), ops.silu_mul(expected), **tolerance)
    residual = random(rows, sum(outputs), device=device, dtype=dtype, seed=2)
    found = expand(y.clone(), inner, factors, tiles, residual)
    assert_close(found.float(), expected + residual.float(), **tolerance)
    assert_close(expand(y, inner, factors, tiles).float(), expected, **tolerance)


def test_a_row_does_not_depend_on_what_else_is_in_the_batch(device: str) -> None:
    factors = random_factors(3, 8, 700, [40, 24], device, torch.float32)
    x = random(20, 700, device=device)
    alone, among = torch.zeros(1, 64, device=device), torch.zeros(20, 64, device=device)
    for y, rows, spans in ((alone, slice(18, 19), [(0, 1, 2)]), (among, slice(0, 20), [(0, 17, 1), (17, 20, 2)])):
        tiles = AdapterTiles(torch.from_numpy(cut_tiles(spans, DECODE_ROWS)).to(device), DECODE_ROWS)
        expand(y, shrink(x[rows], factors, tiles), factors, tiles)
    if device == "cuda":
        assert torch.equal(alone[0], among[18])
    else:  # the interpreter's products are NumPy's, whose sums depend on the number of rows
        assert_close(alone[0], among[18])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 40, 64), (5, 33, 192), (17, 64, 576)])
def test_products_with_quantised_weights(
    rows: int, outputs: int, inputs: int, bits: int, dtype: torch.dtype, device: str
) -> None:
    codes, scales = encode(random(outputs, inputs, device=device), bits)
    if bits == 4:
        numbers = torch.tensor(NF4, device=device)[torch.stack((codes >> 4, codes & 15), -1).int()]
        weight = (numbers.view(outputs, -1, 64) * scales[..., None]).view(outputs, inputs).to(dtype)
    else:
        weight = (codes.float() * scales).to(dtype)
    assert_close(quantised_kernels.decode(codes, scales, dtype), weight, rtol=0, atol=0)
    x = random(rows, inputs, device=device, dtype=dtype, seed=1)
    bias = random(outputs, device=device, dtype=dtype, seed=2)
    expected = F.linear(x.float(), weight.float(), bias.float()).to(dtype)
    for programs in (1, TILE.programs):  # one program for all inputs, and one for each part of them
        found = quantised_kernels.product(x, codes, scales, bias, TILE._replace(programs=programs))
        assert_close(found, expected, **WIDE_ROUNDING[dtype])
