"""Measures what a learner's step and a sampler's answers cost each other on the cores that they share.

    python benchmarks/sharing.py [--seconds 70]

It runs the sampler's and the learner's real processes with the embedded model, or with the one in BENCH_MODEL, on the
CPU. The baseline of each is what it does while the other has nothing to do.

- A step of 8 × 130 tokens alone, and while four answers are being written; the answers' tokens per second, too.
- The time to the first token for two clients that ask one question after the other, with a pause between them: first
  while nobody learns, then while one step follows the other.

Run it on an otherwise idle machine.
"""

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from itertools import count
from typing import Any

from common import machine, model_folder, percentile, sized, table, verdict
from ranks import options

from openclaw_rl.engines.local.process.learner import LocalLearner
from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.worker_messages import WorkerOptions
from openclaw_rl.types import SampleRequest, SamplingParams, Span, TrainingSequence

SAMPLES, PROMPT, RESPONSE = sized((8, 100, 30), (2, 16, 8))
ANSWERS = sized(4, 2)
ROUNDS = sized(3, 1)
#: Tokens that every question of the clients begins with, and tokens of its own.
COMMON, OWN = sized((260, 20), (16, 4))
CLIENTS, ANSWER_TOKENS, THINK_SECONDS = 2, sized(24, 4), sized(0.5, 0.01)
WARM_UP_REQUESTS = 2
RANK, VOCABULARY = 32, sized(40_000, 200)
#: How much longer a step may take during answers, and the first token during a step.
MOST_STEP, MOST_FIRST_TOKEN = 2.0, 1.5


def tokens(length: int) -> list[int]:
    return [random.randrange(100, VOCABULARY) for _ in range(length)]


def batch() -> list[TrainingSequence]:
    span = Span(0, PROMPT, PROMPT + RESPONSE, [-10.0] * RESPONSE, [1.0] * RESPONSE)
    return [TrainingSequence(tokens(PROMPT + RESPONSE), [span]) for _ in range(SAMPLES)]


class Pair:
    """A sampler and a learner."""

    def __init__(self, sampler: LocalSampler, learner: LocalLearner) -> None:
        self.sampler, self.learner = sampler, learner
        self.written = 0
        """Tokens of all answers so far."""
        self.common = tokens(COMMON)

    async def step(self) -> float:
        began = time.monotonic()
        primitives = self.learner.process
        await primitives.forward_backward(batch())
        await primitives.optim_step()
        return time.monotonic() - began

    async def answer(self, prompt: list[int], length: int) -> float:
        """Seconds to the first token."""
        began, first = time.monotonic(), 0.0
        params = SamplingParams(max_tokens=length, temperature=1.0, seed=random.randrange(1 << 30))
        async for drawn in self.sampler.sample(SampleRequest(prompt, params)):
            first = first or time.monotonic() - began
            self.written += len(drawn)
        return first

    async def write(self) -> None:
        """Answers without end."""
        while True:
            await self.answer(tokens(16), 512)

    async def client(self, seconds: list[float]) -> None:
        for number in count():
            first = await self.answer([*self.common, *tokens(OWN)], ANSWER_TOKENS)
            if number >= WARM_UP_REQUESTS:
                seconds.append(first)
            await asyncio.sleep(THINK_SECONDS)

    async def learn(self, seconds: list[float]) -> None:
        while True:
            seconds.append(await self.step())


@contextlib.asynccontextmanager
async def running(*jobs: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(job) for job in jobs]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def opened() -> AsyncIterator[Pair]:
    folder = model_folder()
    sampler = LocalSampler(WorkerOptions(folder, "cpu", "float32", 16, None, 1.0, 2, RANK, pack_weights="auto"), 64)
    await sampler.start()
    given = replace(options(RANK, "cpu"), model=folder)
    learner = LocalLearner(given, sampler.shared_weights)
    await learner.start()
    try:
        yield Pair(sampler, learner)
    finally:
        await learner.close()
        await sampler.close()


async def rate(pair: Pair, seconds: float) -> float:
    before, began = pair.written, time.monotonic()
    await asyncio.sleep(seconds)
    return (pair.written - before) / (time.monotonic() - began)


async def throughput(pair: Pair) -> tuple[float, float, float, float]:
    """Seconds of a step alone, tokens per second alone; both during the other."""
    await pair.step()
    alone = min([await pair.step() for _ in range(ROUNDS)])
    async with running(*(pair.write() for _ in range(ANSWERS))):
        await asyncio.sleep(sized(2, 0.1))
        answers = await rate(pair, sized(6, 0.2))
        before, began = pair.written, time.monotonic()
        steps = [await pair.step() for _ in range(ROUNDS)]
        during = (pair.written - before) / (time.monotonic() - began)
    return alone, answers, percentile(steps, 0.5), during


async def first_tokens(pair: Pair, seconds: float) -> tuple[list[float], list[float], list[float]]:
    """Seconds to the first token while nobody learns and during steps, and seconds of those steps."""
    result: list[list[float]] = []
    steps: list[float] = []
    for learning in (False, True):
        firsts: list[float] = []
        jobs = [pair.client(firsts) for _ in range(CLIENTS)]
        async with running(*jobs, *([pair.learn(steps)] if learning else [])):
            await asyncio.sleep(seconds)
            while not firsts or (learning and not steps):
                await asyncio.sleep(0.1)
        result.append(firsts)
    return result[0], result[1], steps


def times(*numbers: float) -> list[str]:
    return [f"{1e3 * number:.0f}" for number in numbers]


async def measure(seconds: float) -> None:
    random.seed(0)
    async with opened() as pair:
        alone, answers, during, slowed = await throughput(pair)
        idle, learning, steps = await first_tokens(pair, seconds)
    print(machine())
    rows: list[list[object]] = [
        ["a step, s", f"{alone:.1f}", f"{during:.1f}", f"{during / alone:.2f}", at_most(during / alone, MOST_STEP)],
        ["answers, tok/s", f"{answers:.0f}", f"{slowed:.0f}", f"{slowed / answers:.2f}", ""],
    ]
    title = f"A step of {SAMPLES} × {PROMPT + RESPONSE} tokens and {ANSWERS} answers"
    table(title, ["", "alone", "both at once", "ratio", ""], rows)
    rows = []
    for share in (0.5, 0.99):
        before, after = percentile(idle, share), percentile(learning, share)
        check = at_most(after / before, MOST_FIRST_TOKEN) if share == 0.99 else ""
        rows.append([f"p{100 * share:.0f}", *times(before, after), f"{after / before:.2f}", check])
    counts = f"{len(idle)} and {len(learning)} requests; a step takes {percentile(steps, 0.5):.1f} s"
    table(f"Time to the first token, ms ({counts})", ["", "nobody learns", "during steps", "ratio", ""], rows)


def at_most(ratio: float, bound: float) -> str:
    return verdict(ratio, bound, at_least=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=sized(70.0, 0.5), help="of questions, twice")
    asyncio.run(measure(parser.parse_args().seconds))


if __name__ == "__main__":
    main()
