"""Measures what adapters and ordinary parameters add to a decode step on CUDA, and the first tokens of prompts.

    python benchmarks/decoding.py                      random weights at the Qwen3-4B shape, bf16; about a minute
    PYTHONPATH=old/src python benchmarks/decoding.py   the same of another commit's source, as the baseline

Each number is printed as soon as it is measured. Profiles of single steps come last.
"""

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from common import argument_parser
from cuda_engine import CudaEngine, copy_bandwidth, first_token_flops, step_bytes
from measuring import matmul_rate

import openclaw_rl

BATCHES = (1, 16, 64)
SLOTS = 8
#: What is measured of each batch: its name, the slots whose policies answer, and the requests' parameters.
CASES: tuple[tuple[str, Sequence[int], dict[str, Any]], ...] = (
    ("base", (0,), {}),
    ("base, top-p 0.9", (0,), {"top_p": 0.9}),
    ("base, top-k 20 and top-p 0.95", (0,), {"top_k": 20, "top_p": 0.95}),
    ("base, 5 log-probs", (0,), {"top_logprobs": 5}),
    ("one adapter", (1,), {}),
    ("8 adapters", tuple(range(1, SLOTS + 1)), {}),
    ("7 adapters and the base", tuple(range(SLOTS)), {}),
)
START = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - START:6.1f} s] {text}", flush=True)


def show_steps(engine: CudaEngine, batches: Sequence[int], bandwidth: float) -> None:
    for batch in batches:
        base = 0.0
        for name, slots, params in CASES:
            engine.run(batch, slots, rounds=1, **params)  # captures its graph
            _rate, step = engine.run(batch, slots, rounds=2, **params)
            base = base or step
            floor = step_bytes(engine, batch) / bandwidth
            times = f"{step * 1e3:6.3f} ms, {step / base:5.3f} x base, {floor / step:4.0%} of the floor"
            say(f"decode step, batch {batch:2}: {name:30} {times}")


def show_first_tokens(engine: CudaEngine, batches: Sequence[int]) -> None:
    rate = matmul_rate()
    say(f"a large matmul runs at {rate / 1e12:.0f} TFLOP/s")
    for name, slots in (("base", (0,)), ("one adapter", (1,))):
        for batch in batches:
            seconds, floor = engine.first_tokens(batch, slots), first_token_flops(batch) / rate
            times = f"{seconds * 1e3:6.1f} ms, {seconds / floor:4.2f} x the compute floor"
            say(f"first tokens, {batch:2} x 512: {name:12} {times}")


def show_profile(engine: CudaEngine, batch: int, slots: Sequence[int], prompts: bool) -> None:
    """The kernels of one decode step, or of a step that reads prompts."""
    engine.worker.run_ahead = False
    engine.add(batch, 8, slots)
    for _ in range(0 if prompts else 4):
        engine.worker.step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        engine.worker.step()
        torch.cuda.synchronize()
    engine.drain()
    say(f"{'prompts' if prompts else 'decode step'} of batch {batch}, slots {list(slots)}:")
    table = profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=22, max_name_column_width=70)
    kept = [line for line in table.splitlines() if "Self CPU time" not in line]
    print("\n".join(kept), flush=True)


def main(arguments: argparse.Namespace) -> None:
    random.seed(0)
    batches = arguments.batches
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, source {openclaw_rl.__file__}")
    engine = CudaEngine(policy_slots=SLOTS)
    say(f"ready; kernels and graphs of the base model took {engine.warm_up:.1f} s")
    say(f"{SLOTS} adapters of rank 32 loaded in {engine.load_adapter(range(1, SLOTS + 1)):.2f} s")
    bandwidth = copy_bandwidth()
    say(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    show_first_tokens(engine, batches)
    show_steps(engine, batches, bandwidth)
    for batch in batches[:2]:
        show_profile(engine, batch, (1,), prompts=False)
    show_profile(engine, 1, (0,), prompts=True)


if __name__ == "__main__":
    parser = argument_parser(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES, help="sequences in a step")
    main(parser.parse_args())
