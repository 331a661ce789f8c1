"""Measures constrained against free sampling: eight requests at once, on the embedded model.

Both sample the same number of tokens. The schema has objects with strings, numbers and enums, and never ends, so every
token is drawn under a mask. Run it on an otherwise idle machine.
"""

import asyncio
import json
import random
import time
from dataclasses import replace
from statistics import median

from common import machine, model_folder, sized, table, verdict
from tokenizers import Tokenizer

from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.worker_messages import WorkerOptions
from openclaw_rl.types import Constraint, JsonForm, SampleRequest, SamplingParams

TOKENS, ROUNDS = sized((96, 8), (8, 1))
REQUESTS = 8
#: Constrained sampling has at least this part of the speed of free sampling.
TARGET = 0.9
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "role": {"enum": ["reader", "writer", "editor", "owner"]},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 2},
        "score": {"type": "number"},
    },
    "required": ["name", "age", "role", "notes", "score"],
    "additionalProperties": False,
}
SCHEMA = json.dumps({"type": "array", "items": PERSON, "minItems": 10_000})
PROMPT = "Write a JSON list of people with their names, ages, roles, notes and scores."


async def rate(sampler: LocalSampler, jobs: list[SampleRequest]) -> float:
    """Tokens per second of requests that come at once."""

    async def count(job: SampleRequest) -> int:
        return sum([len(tokens) async for tokens in sampler.sample(job)])

    start = time.perf_counter()
    counts = await asyncio.gather(*map(count, jobs))
    assert set(counts) == {TOKENS}
    return sum(counts) / (time.perf_counter() - start)


async def measure() -> None:
    folder = model_folder()
    prompt = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(PROMPT).ids
    sampler = LocalSampler(WorkerOptions(folder, "cpu", "float32", 16, None, None, 4, 32), max_queue=64)
    await sampler.start()

    def jobs(number: int, constraint: Constraint | None) -> list[SampleRequest]:
        # Prompts that no round has asked before: both kinds read theirs.
        prompts = [[*prompt, random.randrange(100, 300), *prompt] for _ in range(REQUESTS)]
        requests = [
            SampleRequest(ids, SamplingParams(max_tokens=TOKENS, seed=number * REQUESTS + i))
            for i, ids in enumerate(prompts)
        ]
        return [replace(request, constraint=constraint) for request in requests]

    constraint = Constraint(JsonForm(SCHEMA))
    start = time.perf_counter()
    await rate(sampler, [replace(job, constraint=constraint) for job in jobs(0, None)])
    first = time.perf_counter() - start
    free, constrained = [], []
    # Alternating, so that a slow phase of the machine affects both.
    for number in range(1, ROUNDS + 1):
        free.append(await rate(sampler, jobs(number, None)))
        constrained.append(await rate(sampler, jobs(number, constraint)))
    await sampler.close()
    ratio = median(constrained) / median(free)
    row = (f"{median(free):.1f}", f"{median(constrained):.1f}", f"{ratio:.3f}", verdict(ratio, TARGET), f"{first:.1f}")
    head = ("free, tok/s", "constrained, tok/s", "ratio", "target", "first round, s")
    table(f"Constrained sampling, {REQUESTS} requests ({machine()})", head, [row])


if __name__ == "__main__":
    random.seed(0)
    asyncio.run(measure())
