"""Measures our sampler, vLLM and `transformers.generate` on the CPU, and what our API adds to vLLM's own.

    OPENCLAW_RL_VLLM=.venv-vllm/bin/python python benchmarks/engines.py [--only engines | api]

OPENCLAW_RL_VLLM names a Python that has vLLM; without it, vLLM is left out. vLLM is started by our server, with the
options of every vLLM server of ours, and the same server answers the requests that go around our API. All measurements
alternate, so that a slow phase of the machine affects all. Run it on an otherwise idle machine; both parts take twenty
minutes on two cores.
"""

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import torch
from common import machine, model_folder, sized, table, verdict

from openclaw_rl.engines.base import Sampler
from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.worker_messages import WorkerOptions
from openclaw_rl.engines.remote.http import InferenceServer
from openclaw_rl.engines.remote.sampler import RemoteOptions, RemoteSampler
from openclaw_rl.engines.remote.vllm import VllmDialect
from openclaw_rl.ledger.run_dir import read_server
from openclaw_rl.types import SampleRequest, SamplingParams

VLLM = os.environ.get("OPENCLAW_RL_VLLM", "")
#: The smallest id that is an ordinary token in the models measured.
FIRST_TEXT_ID = 100
REQUESTS = (1, 8, 16)
#: Tokens of a prompt, of an answer, of a beginning that prompts share, and of what follows it.
PROMPT, ANSWER, PREFIX, SUFFIX = sized((64, 64, 1024, 16), (8, 4, 64, 8))
ROUNDS = sized(3, 1)
#: Requests of which the first token is timed, one after another, through vLLM's API and through ours.
SINGLE_REQUESTS = sized(40, 2)
START_SECONDS = 600
#: The targets of our API above vLLM's: milliseconds to the first token, and the share of its tokens per second.
MAX_ADDED_MS, MIN_SHARE = 3, 0.95


class Timing(NamedTuple):
    """Of requests that were sent at the same time."""

    first: float
    """Seconds to the first token, the median over the requests."""
    rate: float
    """Tokens per second of all requests together."""


def random_ids(length: int, vocabulary: int) -> list[int]:
    return [random.randrange(FIRST_TEXT_ID, vocabulary) for _ in range(length)]


def summary(timings: list[Timing]) -> Timing:
    return Timing(median(timing.first for timing in timings), median(timing.rate for timing in timings))


async def timed(streams: list[AsyncIterator[int]]) -> Timing:
    """Read streams of numbers of tokens at the same time."""
    start = time.perf_counter()

    async def read(stream: AsyncIterator[int]) -> tuple[float, int]:
        first, count = 0.0, 0
        async for tokens in stream:
            first = first or time.perf_counter() - start
            count += tokens
        return first, count

    results = await asyncio.gather(*map(read, streams))
    return Timing(
        median(first for first, _ in results), sum(count for _, count in results) / (time.perf_counter() - start)
    )


# --- Engines ---------------------------------------------------------------------------------------------


async def sampled(sampler: Sampler, prompt: list[int], tokens: int, seed: int) -> AsyncIterator[int]:
    """No stop tokens: exactly so many are sampled."""
    async for batch in sampler.sample(SampleRequest(prompt, SamplingParams(max_tokens=tokens, seed=seed))):
        yield len(batch)


def generated(model: Any, prompts: list[list[int]], tokens: int) -> Timing:
    """`generate` gives all tokens at the end; its first token is measured as an answer of one token."""
    ids = torch.tensor(prompts)

    def seconds(count: int) -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=count,
                min_new_tokens=count,
                do_sample=True,
                top_k=0,
            )
        return time.perf_counter() - start

    return Timing(seconds(1), len(prompts) * tokens / seconds(tokens))


async def measure_engines(model: Any, samplers: dict[str, Sampler], vocabulary: int) -> list[list[str]]:
    rows = []
    for requests in REQUESTS:
        timings: dict[str, list[Timing]] = {name: [] for name in ("generate", *samplers)}
        for round in range(ROUNDS + 1):
            prompts = [random_ids(PROMPT, vocabulary) for _ in range(requests)]
            timings["generate"].append(generated(model, prompts, ANSWER))
            for name, sampler in samplers.items():
                streams = [sampled(sampler, prompt, ANSWER, seed) for seed, prompt in enumerate(prompts)]
                timings[name].append(await timed(streams))
            if round == 0:
                # The first round warms up.
                timings = {name: [] for name in timings}
        rows += engine_rows(f"{requests} request{'s' if requests > 1 else ''}", timings)
    return rows


async def measure_prefixes(samplers: dict[str, Sampler], vocabulary: int) -> list[list[str]]:
    """Eight requests with a common beginning, which the first of them puts into the cache."""
    cold: dict[str, list[Timing]] = {name: [] for name in samplers}
    warm: dict[str, list[Timing]] = {name: [] for name in samplers}
    for _ in range(ROUNDS):
        prefix = random_ids(PREFIX, vocabulary)
        prompts = [[*prefix, *random_ids(SUFFIX, vocabulary)] for _ in range(9)]
        for name, sampler in samplers.items():
            cold[name].append(await timed([sampled(sampler, prompts[0], ANSWER, 0)]))
            warm[name].append(await timed([sampled(sampler, prompt, ANSWER, 1) for prompt in prompts[1:]]))
    return [
        *engine_rows(f"1 request, {PREFIX} tokens, nothing cached", cold),
        *engine_rows("8 requests with the same beginning, cached", warm),
    ]


def engine_rows(title: str, timings: dict[str, list[Timing]]) -> list[list[str]]:
    results = {name: summary(measured) for name, measured in timings.items()}
    ours = results["ours"]
    return [
        [
            title if number == 0 else "",
            name,
            f"{result.first * 1e3:.0f}",
            f"{result.rate:.1f}",
            f"{result.rate / ours.rate:.2f}",
        ]
        for number, (name, result) in enumerate(results.items())
    ]


# --- Our API above vLLM ----------------------------------------------------------------------------------


async def chat(client: httpx.AsyncClient, url: str, question: str, tokens: int, **fields: object) -> AsyncIterator[int]:
    """The tokens of a streamed answer: one with each piece of text, the others with the last event."""
    body = {
        "model": "base",
        "messages": [{"role": "user", "content": question}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }
    pieces = 0
    async with client.stream("POST", f"{url}/v1/chat/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError((await answer.aread()).decode())
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            if event["choices"] and event["choices"][0]["delta"].get("content"):
                pieces += 1
                yield 1
            if event.get("usage"):
                yield event["usage"]["completion_tokens"] - pieces


async def measure_api(bare: str, relay: str, ours: str) -> list[list[str]]:
    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None)) as client:
        # Our API records log-probs and so asks vLLM for them; the last two kinds tell what these cost, and what it
        # costs to pass through any other process while vLLM occupies all cores.
        with_logprobs: dict[str, object] = {"logprobs": True}
        kinds = [(bare, {}), (ours, {}), (bare, with_logprobs), (relay, with_logprobs)]
        singles: list[list[float]] = [[] for _ in kinds]
        for number in range(SINGLE_REQUESTS + 4):
            for (url, fields), firsts in zip(kinds, singles, strict=True):
                # A new question each time, because all go to the same cache.
                question = f"{random.random():.9f}: tell me about the number {number}."
                firsts.append((await timed([chat(client, url, question, 2, **fields)])).first)
        together: dict[str, list[Timing]] = {bare: [], ours: []}
        for round in range(ROUNDS + 2):
            for url in together:
                topics = [f"{random.random()}: count from {n} to {n + 1000} in words." for n in range(REQUESTS[-1])]
                together[url].append(await timed([chat(client, url, topic, ANSWER) for topic in topics]))
            if round == 0:
                together = {bare: [], ours: []}
    alone, through_us, own_logprobs, relayed = (median(firsts[4:]) * 1e3 for firsts in singles)
    added = through_us - alone
    share = summary(together[ours]).rate / summary(together[bare]).rate
    rows = [
        ("first token of 1 request, ms", alone, through_us, f"{added:+.2f}"),
        ("  vLLM's own with log-probs too, ms", own_logprobs, through_us, f"{through_us - own_logprobs:+.2f}"),
        ("  the same through a process that copies bytes", relayed, through_us, f"{through_us - relayed:+.2f}"),
        (f"{REQUESTS[-1]} requests, tok/s", *(summary(together[url]).rate for url in (bare, ours)), f"×{share:.3f}"),
        (
            f"first token of {REQUESTS[-1]} requests, ms",
            *(summary(together[url]).first * 1e3 for url in (bare, ours)),
            "",
        ),
    ]
    targets = (verdict(added, MAX_ADDED_MS, False), "", "", verdict(share, MIN_SHARE), "")
    return [
        [name, f"{a:.1f}", f"{b:.1f}", difference, target]
        for (name, a, b, difference), target in zip(rows, targets, strict=True)
    ]


@contextlib.contextmanager
def relayed_server(url: str) -> Iterator[str]:
    """The address of a process that copies bytes between its clients and the server at the URL."""
    context = multiprocessing.get_context("spawn")
    ports: Any = context.Queue()
    process = context.Process(target=run_relay, args=(httpx.URL(url).port, ports), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ports.get(timeout=START_SECONDS)}"
    finally:
        process.kill()
        process.join()


def run_relay(target: int, ports: Any) -> None:
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(1 << 16):
                writer.write(data)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, requests = await asyncio.open_connection("127.0.0.1", target)
        await asyncio.gather(copy(reader, requests), copy(answers, writer))

    async def serve() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        ports.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(serve())


@contextlib.contextmanager
def our_server(folder: Path, run_dir: Path) -> Iterator[tuple[str, str]]:
    """Our server with a vLLM server of its own: the addresses of vLLM and of our API."""
    flags = f"--sampler vllm --vllm-python {VLLM} --max-steps 0 --proxy-port 0 --dtype float32".split()
    flags += ["--max-context-tokens", str(sized(2048, 256)), "--kv-cache-gib", "1", "--served-model-name", "base"]
    command = [sys.executable, "-m", "openclaw_rl", "serve", "--model-name", str(folder), "--run-dir", str(run_dir)]
    log = run_dir / "log"
    with log.open("w") as file:
        process = subprocess.Popen([*command, *flags], stderr=file)
    try:
        end = time.monotonic() + START_SECONDS
        while not (url := address(run_dir, process.pid)):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")
            time.sleep(0.5)
        (bare,) = httpx.get(f"{url}/readyz").json()["servers"]
        yield bare, url
    finally:
        process.terminate()
        process.wait()


def address(run_dir: Path, pid: int) -> str:
    """The address of our server once it is ready."""
    server = read_server(run_dir)
    url = server.get("url") or ""
    if server.get("pid") != pid or not url:
        return ""
    try:
        return url if httpx.get(f"{url}/readyz", timeout=5).status_code == 200 else ""
    except httpx.HTTPError:
        return ""


# --- The run ---------------------------------------------------------------------------------------------


async def run_engines(bare: str | None) -> None:
    from transformers import AutoModelForCausalLM

    folder = model_folder()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    vocabulary = model.config.vocab_size
    local = LocalSampler(WorkerOptions(folder, "cpu", "float32", 16, None, 1.0, 4, 32), max_queue=64)
    samplers: dict[str, Any] = {"ours": local}
    if bare is not None:
        options = RemoteOptions(folder, None, 16, 64, 4, 32, Path(tempfile.gettempdir()), learns=False)
        samplers["vLLM"] = RemoteSampler(VllmDialect(), [(InferenceServer(bare), None)], options)
    for sampler in samplers.values():
        await sampler.start()
    rows = await measure_engines(model, samplers, vocabulary)
    rows += await measure_prefixes(samplers, vocabulary)
    for sampler in samplers.values():
        await sampler.close()
    head = ("", "", "first token, ms", "tok/s", "of ours")
    table(f"Engines on the CPU (fp32, {PROMPT} + {ANSWER} tokens; {machine()})", head, rows)


async def run_api(bare: str | None, ours: str | None) -> None:
    if bare is None or ours is None:
        print("\nvLLM was left out: OPENCLAW_RL_VLLM names no Python that has it.")
        return
    with relayed_server(bare) as relay:
        rows = await measure_api(bare, relay, ours)
    title = f"Our API with vLLM as its sampler, and the same vLLM's own API ({machine()})"
    table(title, ("", "vLLM", "ours", "", "target"), rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=("engines", "api"))
    only = parser.parse_args().only
    random.seed(0)
    with contextlib.ExitStack() as stack:
        addresses: tuple[str | None, str | None] = (None, None)
        if VLLM:
            run_dir = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            addresses = stack.enter_context(our_server(model_folder(), run_dir))
        if only != "api":
            asyncio.run(run_engines(addresses[0]))
        if only != "engines":
            asyncio.run(run_api(*addresses))


if __name__ == "__main__":
    main()
