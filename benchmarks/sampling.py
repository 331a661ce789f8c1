"""Measures the local engine's sampling against `transformers.generate` and Transformers' continuous batching.

    python benchmarks/sampling.py                 the embedded model on the CPU, through the real worker process
    python benchmarks/sampling.py --device cuda   random weights at the Qwen3-4B shape, bf16, 512-token prompts
    python benchmarks/sampling.py --steps         of these, only the decode steps

Every ratio compares two measurements of the same run on the same machine. Run it on an otherwise idle machine.
"""

import asyncio
import random
import time
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import torch
from common import argument_parser, machine, model_folder, sized, table, verdict
from cuda_engine import (
    CUDA_PROMPT,
    CUDA_TOKENS,
    CudaEngine,
    copy_bandwidth,
    first_token_flops,
    random_prompt,
    request,
    step_bytes,
    timed,
)
from measuring import matmul_rate
from shapes import QWEN3_4B, transformers_model

from openclaw_rl.engines.local.model.cpu_precision import choose_on_cpu
from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.worker_messages import WorkerOptions
from openclaw_rl.types import SampleRequest

STAGGER_SECONDS = sized(0.2, 0.02)
#: On the CPU: tokens of a prompt and of an answer, measurements, and tokens of a long history.
TOKENS = sized(64, 8)
ROUNDS, BATCHING_ROUNDS = sized((8, 3), (1, 1))
HISTORY = sized(2000, 200)
#: Of Transformers' continuous batching: blocks of 256 tokens in its cache, and tokens in a batch.
CACHE_BLOCKS, BATCH_TOKENS = 64, 1024


def generate(model: Any, prompts: list[list[int]], new_tokens: int) -> None:
    """The baseline: Transformers with its default settings."""
    ids = torch.tensor(prompts, device=model.device)
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        model.generate(
            ids, attention_mask=mask, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=True, top_k=0
        )


# --- CPU -------------------------------------------------------------------------------------------------


async def first_and_last(sampler: LocalSampler, job: SampleRequest) -> tuple[float, float, int]:
    """Seconds to the first and to the last token, and the number of tokens."""
    start = time.perf_counter()
    first = 0.0
    count = 0
    async for tokens in sampler.sample(job):
        first = first or time.perf_counter() - start
        count += len(tokens)
    return first, time.perf_counter() - start, count


async def staggered(sampler: LocalSampler, jobs: list[SampleRequest]) -> float:
    """Tokens per second of requests that arrive one after another, from the first arrival to the last token."""

    async def arrive(number: int, job: SampleRequest) -> int:
        await asyncio.sleep(number * STAGGER_SECONDS)
        return (await first_and_last(sampler, job))[2]

    start = time.perf_counter()
    counts = await asyncio.gather(*(arrive(number, job) for number, job in enumerate(jobs)))
    return sum(counts) / (time.perf_counter() - start)


def continuous_batching(model: Any, vocabulary: int) -> tuple[float, float]:
    """Tokens per second of Transformers' own continuous batching: one request, and eight at once. Warmed up first."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    settings = GenerationConfig(max_new_tokens=TOKENS, do_sample=True, eos_token_id=-1, pad_token_id=0)
    # By default its cache takes nearly all of the machine's free memory, which others may need.
    memory = ContinuousBatchingConfig(num_blocks=CACHE_BLOCKS, max_batch_tokens=BATCH_TOKENS)
    manager = model.init_continuous_batching(generation_config=settings, continuous_batching_config=memory)
    manager.start()

    def rate(requests: int) -> float:
        start = time.perf_counter()
        for _ in range(requests):
            manager.add_request(random_prompt(TOKENS, vocabulary), max_new_tokens=TOKENS)
        finished = 0
        while finished < requests:
            result = manager.get_result(timeout=60)
            finished += result is not None and result.is_finished()
        return requests * TOKENS / (time.perf_counter() - start)

    rate(8)
    rates = median(rate(1) for _ in range(BATCHING_ROUNDS)), median(rate(8) for _ in range(BATCHING_ROUNDS))
    manager.stop(block=True)
    return rates


@dataclass
class Measured:
    """What was measured of one of our engines."""

    single: list[float] = field(default_factory=list)
    """Tokens per second of a request alone."""
    eight: list[float] = field(default_factory=list)
    """Of eight requests that arrive one after another."""
    cold: float = 0.0
    """Seconds to the first token of a long prompt."""

    async def add(self, sampler: LocalSampler, vocabulary: int, seed: int) -> None:
        _first, last, count = await first_and_last(sampler, request(random_prompt(TOKENS, vocabulary), TOKENS, seed))
        self.single.append(count / last)
        if seed % 3 == 0:
            jobs = [request(random_prompt(TOKENS, vocabulary), TOKENS, i) for i in range(8)]
            self.eight.append(await staggered(sampler, jobs))


#: What `--pack-weights` auto has to gain over off and on: a single stream, and eight requests.
PACK_TARGETS = {"off": (0.0, 1.8), "on": (1.5, 1.8)}
NARROW = "bfloat16"


def compare(measured: dict[str, Measured], choice: str, other: str, targets: tuple[float, float]) -> None:
    one, two = measured[choice], measured[other]
    rows = [
        ("single stream, tok/s", median(one.single), median(two.single), targets[0]),
        ("8 requests, 200 ms apart, tok/s", median(one.eight), median(two.eight), targets[1]),
        (f"prompt of {HISTORY} tokens, tok/s", HISTORY / one.cold, HISTORY / two.cold, 0.0),
    ]
    cells = [
        (name, f"{a:.3g}", f"{b:.3g}", f"{b / a:.2f}", verdict(b / a, target) if target else "")
        for name, a, b, target in rows
    ]
    table("Choices of --pack-weights and --dtype (embedded model)", ("", choice, other, "ratio", "target"), cells)


async def on_cpu() -> None:
    from transformers import AutoModelForCausalLM

    folder = model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    options = WorkerOptions(folder, "cpu", "float32", 16, None, None, 4, 32)
    choices = {
        choice: LocalSampler(replace(options, pack_weights=choice), max_queue=64) for choice in ("off", "on", "auto")
    }
    if choose_on_cpu(None).dtype == NARROW:
        choices[NARROW] = LocalSampler(replace(options, dtype=NARROW, pack_weights="auto"), max_queue=64)
    sampler = choices["auto"]
    vocabulary = model.config.vocab_size
    alone: list[float] = []
    measured = {engine: Measured() for engine in choices.values()}
    generate(model, [random_prompt(TOKENS, vocabulary)], 8)
    for engine in measured:
        await engine.start()
        while engine.packed is None:
            await asyncio.sleep(0.1)
        await first_and_last(engine, request(random_prompt(TOKENS, vocabulary), 8))
    # Alternating, so that a slow phase of the machine affects all.
    for seed in range(ROUNDS):
        prompt = random_prompt(TOKENS, vocabulary)
        alone.append(TOKENS / timed(lambda prompt=prompt: generate(model, [prompt], TOKENS)))
        for engine, results in measured.items():
            await results.add(engine, vocabulary, seed)
    theirs = continuous_batching(model, vocabulary)
    history = random_prompt(HISTORY, vocabulary)
    for engine, results in measured.items():
        results.cold, _last, _count = await first_and_last(engine, request(history[:-10], 1))
    warm, _last, _count = await first_and_last(sampler, request(history, 1))
    by_choice = {choice: measured[engine] for choice, engine in choices.items()}
    for choice, targets in PACK_TARGETS.items():
        # Where there is no copy in float16, auto is at most what on is.
        judged = choice == "off" or sampler.packed.dtype == "float16"
        compare(by_choice, choice, "auto", targets if judged else (0.0, 0.0))
    print(f"  auto: {sampler.describe()}")
    for choice in ("off", "on", "auto") if NARROW in choices else ():
        compare(by_choice, choice, NARROW, (1, 1))
    for engine in measured:
        await engine.close()
    ours = measured[sampler]
    show_cpu(median(alone), median(ours.single), median(ours.eight), theirs, ours.cold, warm)


def show_cpu(alone: float, ours: float, burst: float, theirs: tuple[float, float], cold: float, warm: float) -> None:
    # Eight requests one after another have the rate of one request, however they arrive.
    rows = [
        ("single stream, tok/s", alone, ours, ours / alone, verdict(ours / alone, 1.2)),
        ("8 requests, 200 ms apart, tok/s", alone, burst, burst / alone, verdict(burst / alone, 3)),
        ("Transformers' continuous batching, single stream, tok/s", theirs[0], ours, ours / theirs[0], ""),
        ("  its eight at once, ours 200 ms apart, tok/s", theirs[1], burst, burst / theirs[1], ""),
        ("first token of 2,000, cold → cached, s", cold, warm, warm / cold, verdict(warm / cold, 1 / 8, False)),
    ]
    cells = [(name, f"{a:.3g}", f"{b:.3g}", f"{c:.3g}", target) for name, a, b, c, target in rows]
    head = ("embedded model, fp32", "generate / cold", "ours / cached", "ratio", "target")
    table(f"Sampling on the CPU ({machine()})", head, cells)


# --- CUDA ------------------------------------------------------------------------------------------------


BATCHES = (1, 16, 64)
#: By batch: how many times the rate of `generate`, and the share of the bandwidth floor that a decode step reaches.
CUDA_RATES = {1: 8, 16: 8, 64: 4}
CUDA_SHARES = {1: 0.7, 16: 0.6, 64: 0.6}


def baseline_on_cuda() -> dict[int, float]:
    model = transformers_model(QWEN3_4B, "cuda").eval()
    results = {}
    for batch in BATCHES:
        prompts = [random_prompt(CUDA_PROMPT, QWEN3_4B.vocab) for _ in range(batch)]
        generate(model, prompts, 4)
        torch.cuda.synchronize()
        # The best of three, as for our engine.
        seconds = min(timed(lambda prompts=prompts: generate(model, prompts, CUDA_TOKENS)) for _ in range(3))
        results[batch] = batch * CUDA_TOKENS / seconds
    return results


def on_cuda() -> None:
    baseline = baseline_on_cuda()
    torch.cuda.empty_cache()
    engine = CudaEngine()
    rows = []
    for batch in BATCHES:
        rate, _step = engine.run(batch)
        ratio = rate / baseline[batch]
        rows.append((batch, f"{baseline[batch]:.0f}", f"{rate:.0f}", f"{ratio:.1f}", verdict(ratio, CUDA_RATES[batch])))
    head = ("batch", "generate tok/s", "ours tok/s", "ratio", "target")
    table("Sampling on CUDA (random Qwen3-4B shape, bf16, 512 + 64 tokens, prompts read included)", head, rows)
    print(f"  graphs captured in {engine.warm_up:.1f} s")
    show_steps(engine)
    show_first_tokens(engine)
    loading = engine.load_adapter()
    steps = [(batch, f"{engine.run(batch, slots=(1,))[1] * 1e3:.2f}") for batch in BATCHES]
    table("With an adapter of rank 32", ("batch", "decode step ms"), steps)
    print(f"  the adapter was loaded in {loading:.2f} s")


def show_steps(engine: CudaEngine) -> None:
    """Decode steps, and what they gain by being started before the step before has been waited for."""
    bandwidth, rows = copy_bandwidth(), []
    for batch in BATCHES:
        (_rate, waiting), (_rate, step) = engine.run(batch, run_ahead=False), engine.run(batch)
        share = step_bytes(engine, batch) / bandwidth / step
        times = (f"{waiting * 1e3:.2f}", f"{step * 1e3:.2f}")
        rows.append((batch, *times, f"{share:.0%}", verdict(share, CUDA_SHARES[batch])))
    head = ("batch", "waiting for each, ms", "running ahead, ms", "of bandwidth floor", "target")
    table("Decode steps (random Qwen3-4B shape, bf16, 512 + 64 tokens)", head, rows)
    weights = engine.decoder.weight_bytes
    print(f"  copy bandwidth {bandwidth / 1e12:.2f} TB/s: at most {bandwidth / weights:.0f} steps/s")


def show_first_tokens(engine: CudaEngine) -> None:
    rate = matmul_rate()
    rows = []
    for batch in BATCHES:
        seconds, floor = engine.first_tokens(batch), first_token_flops(batch) / rate
        check = verdict(seconds / floor, 1.5, at_least=False) if batch == BATCHES[-1] else ""
        rows.append(
            (f"{batch} × {CUDA_PROMPT}", f"{seconds * 1e3:.0f}", f"{floor * 1e3:.0f}", f"{seconds / floor:.2f}", check)
        )
    head = ("prompts", "ms to the last first token", "compute floor ms", "ratio", "target")
    table(f"First tokens (a large matmul runs at {rate / 1e12:.0f} TFLOP/s)", head, rows)


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where (default: cpu)")
    parser.add_argument("--steps", action="store_true", help="only the decode steps, on CUDA")
    options = parser.parse_args()
    random.seed(0)
    if options.steps:
        show_steps(CudaEngine())
    else:
        on_cuda() if options.device == "cuda" else asyncio.run(on_cpu())
