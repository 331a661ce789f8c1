"""The forward pass of fused kernels computes what the decoder computes, for every family, whatever a step holds.

Runs compiled where there is a GPU and in Triton's interpreter where there is none, like `test_kernels`. Captured graphs
need a GPU.
"""

import os
import sys
from collections.abc import Sequence as Items
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton was imported compiled: set TRITON_INTERPRET=1", allow_module_level=True)
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from openclaw_rl.engines.local.model.adapter_kernels import (  # noqa: E402
    DECODE_ROWS,
    PROMPT_ROWS,
    AdapterTiles,
    cut_tiles,
)
from openclaw_rl.engines.local.model.decoder import Decoder, load_decoder  # noqa: E402
from openclaw_rl.engines.local.model.policy_slots import AdapterSlots  # noqa: E402
from openclaw_rl.engines.local.process.sampler_worker import Worker  # noqa: E402
from openclaw_rl.engines.local.process.worker_messages import Add, LoadPolicy, WorkerOptions  # noqa: E402
from openclaw_rl.engines.local.sampling.cuda_forward import (  # noqa: E402
    CudaBatch,
    CudaKVCache,
    StepAdapters,
    hidden_states,
    next_logits,
    page_table,
)
from openclaw_rl.engines.local.sampling.cuda_runner import PromptInputs  # noqa: E402
from openclaw_rl.engines.local.sampling.page_pool import PAGE_SIZE  # noqa: E402
from openclaw_rl.engines.local.sampling.scheduler import Sequence, Work, pages_for  # noqa: E402
from openclaw_rl.types import SamplingParams  # noqa: E402
from support.decoders import FAMILIES, causal  # noqa: E402
from support.workers import Answers, ids, request, run  # noqa: E402

pytestmark = pytest.mark.more

PAGES = 40
#: Tokens of the sequences in a batch. Triton's interpreter is slow, so there most of them are shorter.
LENGTHS = (20, 27, 34, 41, 48, 55) if DEVICE == "cuda" else (20, 3, 10, 17, 24, 33)


@pytest.fixture(params=["llama-biased-tied", "qwen3", "smollm3"])
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> Decoder:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path)
    return load_decoder(tmp_path, torch.float32, torch.device(DEVICE))


def sequences(lengths: Items[int]) -> list[Sequence]:
    """Random tokens, each sequence with pages of its own from all over the cache."""
    generator = torch.Generator().manual_seed(1)
    free = torch.randperm(PAGES, generator=generator).tolist()
    made = []
    for number, length in enumerate(lengths):
        ids = torch.randint(0, 200, (length,), generator=generator).tolist()
        sequence = Sequence(number, 0, ids, SamplingParams(max_tokens=1), 0, 0, (0, number))
        sequence.pages = [free.pop() for _ in range(pages_for(length))]
        made.append(sequence)
    return made


@torch.inference_mode()
def reference(decoder: Decoder, ids: list[int]) -> Tensor:
    run = torch.tensor(ids, device=DEVICE)
    return decoder.logits(decoder.forward(run, torch.arange(len(ids), device=DEVICE), causal))


@torch.inference_mode()
def test_prompts_beside_generated_tokens_in_one_step(decoder: Decoder) -> None:
    """One sequence generates, one is read whole and one has a beginning in the cache."""
    first, second, third = sequences([50, 37, 90])
    cache = CudaKVCache(decoder.shape, PAGES, torch.float32, torch.device(DEVICE))
    for side in cache.pages:
        side.fill_(torch.nan)
    hidden_states(decoder, cache.pages, cache.batch([Work(first, 0, 49), Work(third, 0, 2 * PAGE_SIZE)]))
    work = [Work(first, 49, 1), Work(second, 0, 37), Work(third, 2 * PAGE_SIZE, 90 - 2 * PAGE_SIZE)]
    found = decoder.logits(hidden_states(decoder, cache.pages, cache.batch(work)))
    expected = torch.cat([reference(decoder, item.sequence.tokens)[item.start : item.stop] for item in work])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_prompts_as_a_graph_takes_them(tiny_model: Path, adapters: list[Path]) -> None:
    """Inputs in memory that stays in place, padded, with what an earlier step left in it."""
    device = torch.device(DEVICE)
    decoder = load_decoder(tiny_model, torch.float32, device)
    policies = AdapterSlots(decoder.shape, 3, 4, torch.float32, device)
    for slot, folder in enumerate(adapters, start=1):
        policies.load(slot, folder)
    first, second, third = sequences([9, 17, 30])
    second.slot, third.slot = 1, 3
    cache = CudaKVCache(decoder.shape, PAGES, torch.float32, device)
    inputs = PromptInputs(cache, 512)
    for work in (
        [Work(first, 0, 8), Work(second, 0, 17), Work(third, 0, 16)],
        [Work(first, 8, 1), Work(third, 16, 14)],
    ):
        size = inputs.size(work)
        assert size == 64
        inputs.write(work, size)
        hidden = hidden_states(decoder, cache.pages, inputs.batch(size), inputs.adapters(policies, size))
        found, place = decoder.logits(hidden), 0
        for item in work:
            ids = torch.tensor(item.sequence.tokens, device=device)
            adapt = policies.adapt([(0, len(ids), item.sequence.slot)])
            expected = decoder.logits(decoder.forward(ids, torch.arange(len(ids), device=device), causal, adapt))
            rows = found[place : place + item.count]
            torch.testing.assert_close(rows, expected[item.start : item.stop], rtol=1e-3, atol=1e-3)
            place += item.count


def one_token_each(cache: CudaKVCache, made: list[Sequence]) -> CudaBatch:
    """The last token of each sequence, and a row of padding if there are several."""
    ids, positions, slots, _ = cache.batch([Work(one, len(one.tokens) - 1, 1) for one in made])
    if len(made) == 1:
        table = torch.from_numpy(page_table([made[0].pages])).to(DEVICE)
        lengths = torch.tensor([len(made[0].tokens)], dtype=torch.int32, device=DEVICE)
        return CudaBatch(ids, positions, slots, cache.decode(table, lengths))
    table = torch.from_numpy(page_table([*(one.pages for one in made), [0]])).to(DEVICE)
    lengths = torch.tensor([*(len(one.tokens) for one in made), 0], dtype=torch.int32, device=DEVICE)
    none = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    columns = [torch.cat([column, padding]) for column, padding in ((ids, none), (positions, none), (slots, none - 1))]
    return CudaBatch(*columns, cache.decode(table, lengths))


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 3, 6])
def test_one_token_of_each_row(decoder: Decoder, rows: int) -> None:
    """One row, which fused products take, and more."""
    made = sequences(LENGTHS[:rows])
    cache = CudaKVCache(decoder.shape, PAGES, torch.float32, torch.device(DEVICE))
    hidden_states(decoder, cache.pages, cache.batch([Work(one, 0, len(one.tokens) - 1) for one in made]))
    found = next_logits(decoder, cache.pages, one_token_each(cache, made))
    expected = torch.stack([reference(decoder, one.tokens)[-1] for one in made])
    torch.testing.assert_close(found[:rows], expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("rows", "bits"), [(1, 0), (3, 0), (6, 0), (3, 8), (6, 4)])
def test_rows_with_different_adapters(tiny_model: Path, adapters: list[Path], rows: int, bits: int) -> None:
    """Also on weights that are stored in fewer bits."""
    device = torch.device(DEVICE)
    decoder = load_decoder(tiny_model, torch.float32, device, bits=bits)
    assert bool(decoder.layers[0].quantised) == bool(bits)
    policies = AdapterSlots(decoder.shape, 3, 4, torch.float32, device)
    for slot, folder in enumerate(adapters, start=1):
        policies.load(slot, folder)
    made, slots = sequences(LENGTHS[:rows]), sorted((i + 1) % 4 for i in range(rows))
    cache = CudaKVCache(decoder.shape, PAGES, torch.float32, device)

    def adapters(spans: list[tuple[int, int, int]], tile_rows: int) -> StepAdapters:
        table = torch.from_numpy(cut_tiles(spans, tile_rows)).to(device)
        chosen = torch.tensor([*slots, 0], dtype=torch.int32, device=device)
        return StepAdapters(policies, AdapterTiles(table, tile_rows), chosen)

    work = [Work(one, 0, len(one.tokens) - 1) for one in made]
    ends = [sum(item.count for item in work[: i + 1]) for i in range(rows)]
    spans = [(end - item.count, end, slot) for item, end, slot in zip(work, ends, slots, strict=True)]
    hidden_states(decoder, cache.pages, cache.batch(work), adapters(spans, PROMPT_ROWS))
    each = adapters([(row, row + 1, slot) for row, slot in enumerate(slots)], DECODE_ROWS)
    found = next_logits(decoder, cache.pages, one_token_each(cache, made), each)
    for row, (one, slot) in enumerate(zip(made, slots, strict=True)):
        ids, places = torch.tensor(one.tokens, device=device), torch.arange(len(one.tokens), device=device)
        adapt = policies.adapt([(0, len(one.tokens), slot)])
        expected = decoder.logits(decoder.forward(ids, places, causal, adapt))[-1]
        torch.testing.assert_close(found[row], expected, rtol=1e-3, atol=1e-3)


def answers(model: Path, adapters: list[Path], device: str, bits: int, count: int) -> Answers:
    """Of a worker with requests for three adapters and the base model, and prompts of different lengths."""
    decoder = load_decoder(model, torch.float32, torch.device(device), bits=bits)
    worker = Worker(decoder, WorkerOptions(model, device, "float32", 24, None, 0.05, 4, 4))
    for slot, folder in enumerate(adapters, start=1):
        worker.obey(LoadPolicy(slot, slot, folder))
    jobs = [request([(7 * n + i) % 200 for i in range(3 + 7 * n)], max_tokens=6) for n in range(1, count + 1)]
    return run(worker, [(0, Add(n, job, n % 4, n % 4)) for n, job in enumerate(jobs, start=1)])


@pytest.mark.skipif(DEVICE == "cpu", reason="captures CUDA graphs")
@pytest.mark.parametrize("bits", [0, 4, 8])
@pytest.mark.parametrize("count", [1, 4, 20])
def test_graphs_answer_as_a_cpu_does(tiny_model: Path, adapters: list[Path], bits: int, count: int) -> None:
    expected = answers(tiny_model, adapters, "cpu", bits, count)
    found = answers(tiny_model, adapters, "cuda", bits, count)
    for key, tokens in expected.items():
        assert ids(found[key]) == ids(tokens)
        assert [t.logprob for t in found[key]] == pytest.approx([t.logprob for t in tokens], abs=1e-3)
