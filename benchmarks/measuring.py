"""Measures seconds and peak memory of a PyTorch computation, on the CPU or on a GPU."""

import gc
import time
from collections.abc import Callable
from pathlib import Path

import torch
from common import sized

ROUNDS = sized(3, 1)

Step = Callable[[], object]


def timed(step: Step) -> float:
    wait()
    start = time.perf_counter()
    step()
    wait()
    return time.perf_counter() - start


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def best(*steps: Step) -> list[float]:
    """Seconds of each step: the best of `ROUNDS` after a warm-up, with the steps alternating."""
    for step in steps:
        step()
    times = [[timed(step) for step in steps] for _ in range(ROUNDS)]
    return [min(column) for column in zip(*times, strict=True)]


def resident(field: str) -> int:
    """The memory of this process in Linux: VmRSS (now) or VmHWM (peak)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def peak(step: Step, device: str) -> int:
    """Bytes that a first step takes above the memory before it."""
    gc.collect()
    if device == "cpu":
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        step()
        return resident("VmHWM") - before
    wait()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    wait()
    return torch.cuda.max_memory_allocated() - before


def matmul_rate() -> float:
    """FLOP/s of a large matrix product in bf16 on the GPU."""
    left, right = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product: Step = lambda: [left @ right for _ in range(10)]  # noqa: E731
    return 10 * 2 * 8192**3 / best(product)[0]
