"""Measures lines of policies on one engine: many people's adapters in one batch, and how long a change of line takes.

Random weights at a real shape, in the processes of the server (on a GPU; a tiny model on a CPU with BENCH_SMOKE=1):
- tokens a second of as many requests as people, all with one adapter, and each with an adapter of its own;
- how long the learner takes to go from one line to another, and to load a line that it did not hold;
- how much later the first token comes if the adapter of a request has to be loaded;
- with the times that were measured, how long simulated people wait with a full batch, up to 1,000 of them.
On an H200 at the shape of Qwen3-4B it takes about four minutes, most of them to write and load the weights.
"""

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from common import argument_parser, machine, percentile, sized, table, verdict
from cuda_engine import random_prompt
from shapes import QWEN3_0_6B, SHAPES, save_random_model

from openclaw_rl.engines.base import policy_in
from openclaw_rl.engines.local.process.learner import LocalLearner
from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.worker_messages import LearnerOptions, WorkerOptions
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.options import LINEAR_MODULES
from openclaw_rl.types import (
    SHARED,
    LossSettings,
    SampleRequest,
    SamplingParams,
    Span,
    TrainingSequence,
    TrainingSettings,
)

#: Of the tokens a second with one adapter, those with one for each request, at least.
LEAST_SHARE = 0.8
MOST_SWITCH_MS, MOST_LOAD_MS = 50, 250
PROMPT = 128
#: Answers of a step, seconds between two judged answers of one person, and for how long people are simulated.
BATCH, PAUSE, HOUR = 8, 300.0, 3600.0
REPEATS = sized(5, 2)
#: Layers and width of the model in a smoke run.
TINY = {"vocab": 512, "hidden": 64, "intermediate": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
TRAINING = TrainingSettings(LossSettings(), 1, 1e-4, (0.9, 0.95), 0.0, 1.0, 100.0, 0)


def a_request(vocabulary: int, tokens: int, line: str = SHARED, version: int | None = None) -> SampleRequest:
    params = SamplingParams(max_tokens=tokens, seed=1)
    return SampleRequest(random_prompt(PROMPT, vocabulary), params, version=version, line=line)


async def finish(sampler: LocalSampler, request: SampleRequest) -> float:
    """Seconds to the first token of an answer that is read to its end."""
    began, first = time.perf_counter(), 0.0
    async for _ in sampler.sample(request):
        first = first or time.perf_counter() - began
    return first


async def tokens_a_second(sampler: LocalSampler, requests: list[SampleRequest]) -> float:
    began = time.perf_counter()
    await asyncio.gather(*(finish(sampler, request) for request in requests))
    return sum(request.params.max_tokens for request in requests) / (time.perf_counter() - began)


async def sampling(sampler: LocalSampler, adapter: Path, people: int, tokens: int, vocabulary: int) -> None:
    for number in range(people + 1):
        # As candidates, so that all of them are loaded now.
        await sampler.publish(number + 1, policy_in(adapter), candidate=True, line=f"person-{number}")
        sampler.promote(number + 1)
    one, each = [], []
    for _ in range(REPEATS + 1):
        one.append(await tokens_a_second(sampler, [a_request(vocabulary, tokens, "person-1") for _ in range(people)]))
        lines = [a_request(vocabulary, tokens, f"person-{number + 1}") for number in range(people)]
        each.append(await tokens_a_second(sampler, lines))
    # The first round compiles.
    alone, apart = median(one[1:]), median(each[1:])
    rows = [("one adapter", f"{alone:.0f}", ""), (f"{people} adapters", f"{apart:.0f}", f"{apart / alone:.2f} of it")]
    table(f"Tokens a second, {people} requests of {tokens} tokens", ["", "tokens/s", ""], rows)
    print(f"  {verdict(apart / alone, LEAST_SHARE)}")
    waits = []
    for number in range(REPEATS):
        loaded = await finish(sampler, a_request(vocabulary, 1, "person-1"))
        await sampler.publish(1000 + number, policy_in(adapter), line=f"stranger-{number}")
        waits.append(1e3 * (await finish(sampler, a_request(vocabulary, 1, f"stranger-{number}")) - loaded))
    load = median(waits)
    print(f"\nA line that was not loaded: {load:.0f} ms later, {verdict(load, MOST_LOAD_MS, at_least=False)}")


async def learning(learner: LocalLearner, vocabulary: int, folder: Path) -> tuple[float, float]:
    """Seconds of a step of `BATCH` answers, and of loading a line."""
    span = Span(1, PROMPT // 2, PROMPT, [-1.0] * (PROMPT // 2), [1.0] * (PROMPT // 2))
    batch = [
        TrainingSequence(random_prompt(PROMPT, vocabulary), [replace(span, turn=number)]) for number in range(BATCH)
    ]
    lines = {name: learner.for_line(name) for name in ("anna", "ben")}
    steps = []
    for line in lines.values():
        await line.reset()
        for _ in range(REPEATS):
            steps.append((await line.step(batch)).seconds)
    switches = []
    for number in range(4 * REPEATS):
        began = time.perf_counter()
        await learner.process.select(("anna", "ben")[number % 2])
        switches.append(1e3 * (time.perf_counter() - began))
    await lines["anna"].save(folder)
    await learner.drop_line("anna")
    began = time.perf_counter()
    await lines["anna"].load(folder)
    load = 1e3 * (time.perf_counter() - began)
    switch = median(switches[1:])
    print(f"\nThe learner goes to another line in {switch:.1f} ms, {verdict(switch, MOST_SWITCH_MS, at_least=False)}")
    print(f"It loads a line that it did not hold in {load:.0f} ms, and makes a step in {1e3 * median(steps):.0f} ms.")
    return median(steps), load / 1e3


def waits(people: int, step: float, load: float, held: int, seed: int = 0) -> tuple[float, list[float]]:
    """The share of an hour that the learner works, and how long each full batch of these people waited, in seconds.

    Each has a judged answer every `PAUSE` seconds on average. Whoever has waited longest is next, as in `learn.lines`.
    """
    dice = random.Random(seed)
    full: list[tuple[float, int]] = []
    for person in range(people):
        moment, answers = 0.0, dice.randrange(BATCH)
        while (moment := moment + dice.expovariate(1 / PAUSE)) < HOUR:
            answers += 1
            if answers % BATCH == 0:
                full.append((moment, person))
    now = worked = 0.0
    waited = []
    recent: dict[int, None] = {}
    for moment, person in sorted(full):
        seconds = step + (0.0 if person in recent else load)
        recent.pop(person, None)
        recent[person] = None
        if len(recent) > held:
            recent.pop(next(iter(recent)))
        now = max(now, moment)
        waited.append(now - moment)
        now += seconds
        worked += seconds
    return worked / max(now, HOUR), waited


def show_waits(step: float, load: float) -> None:
    rows = []
    for people in (10, 100, 1000):
        busy, waited = waits(people, step, load, held=16)
        slow = [f"{percentile(waited, share):.1f}" for share in (0.5, 0.99)]
        rows.append((people, len(waited), f"{busy:.0%}", *slow, f"{max(waited):.1f}"))
    head = ["people", "steps an hour", "learner works", "p50 s", "p99 s", "longest s"]
    table(f"Simulated: a full batch of {BATCH} waits, one judged answer each {PAUSE:.0f} s a person", head, rows)


async def measure(given: argparse.Namespace, scratch: Path) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = sized(SHAPES[given.shape], QWEN3_0_6B)
    if sized(False, True):
        shape = replace(shape, **TINY, rotary_layers=(True,) * TINY["layers"])
    model, adapter, saved = scratch / "model", scratch / "adapter", scratch / "saved"
    save_random_model(model, shape, device)
    LoraWeights.create(shape, given.rank, 2.0 * given.rank).save(adapter, "random")
    saved.mkdir()
    dtype = "bfloat16" if device == "cuda" else "float32"
    cache = None if device == "cuda" else 0.1
    options = WorkerOptions(model, device, dtype, given.people, 1024, cache, given.people + 2, given.rank)
    sampler = LocalSampler(options, max_queue=given.people)
    await sampler.start()
    settings = LearnerOptions(
        model, device, dtype, given.rank, 2.0 * given.rank, 0.0, LINEAR_MODULES, TRAINING, 4096, False, "random"
    )
    learner = LocalLearner(settings, sampler.shared_weights)
    try:
        await sampling(sampler, adapter, given.people, given.tokens, shape.vocab)
        await learner.start()
        show_waits(*await learning(learner, shape.vocab, saved))
    finally:
        await learner.close()
        await sampler.close()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-4B", help="of the model")
    parser.add_argument("--people", type=int, default=sized(64, 4), help="adapters, and requests at once")
    parser.add_argument("--rank", type=int, default=16, help="of each adapter")
    parser.add_argument("--tokens", type=int, default=sized(128, 8), help="of each answer")
    given = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        asyncio.run(measure(given, Path(scratch)))


if __name__ == "__main__":
    main()
