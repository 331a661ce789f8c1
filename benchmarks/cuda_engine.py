"""The sampling worker in this process, with random weights, for measurements on CUDA."""

import random
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import sized
from measuring import wait
from shapes import QWEN3_4B, random_decoder

from openclaw_rl.engines.local.model.decoder import PROJECTIONS
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, LoadPolicy, WorkerOptions
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.types import SampleRequest, SamplingParams

#: The smallest id that is an ordinary token in the models measured.
FIRST_TEXT_ID = 100
#: Tokens of a prompt and of an answer.
CUDA_PROMPT, CUDA_TOKENS = sized((512, 64), (16, 4))


def random_prompt(length: int, vocabulary: int) -> list[int]:
    return [random.randrange(FIRST_TEXT_ID, vocabulary) for _ in range(length)]


def request(prompt: list[int], new_tokens: int, seed: int = 0, **params: Any) -> SampleRequest:
    """No stop tokens: exactly `new_tokens` are sampled."""
    return SampleRequest(prompt, SamplingParams(max_tokens=new_tokens, seed=seed, **params))


def timed(work: Callable[[], Any]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


class CudaEngine:
    """Our engine in this process, with random weights and room for adapters of rank 32."""

    def __init__(
        self,
        decoder: LanguageModel | None = None,
        cache_gib: float | None = None,
        policy_slots: int = 4,
        max_sequences: int = 64,
    ) -> None:
        """Without a decoder, at the shape of Qwen3-4B."""
        with torch.inference_mode():
            self.decoder = decoder or random_decoder(QWEN3_4B, torch.bfloat16, torch.device("cuda"))
        device = self.decoder.embed.device.type
        context = min(8192, self.decoder.shape.max_context)
        start = time.perf_counter()
        options = WorkerOptions(Path(), device, "bfloat16", max_sequences, context, cache_gib, policy_slots, 32)
        self.worker = Worker(self.decoder, options)
        wait()
        self.warm_up = time.perf_counter() - start
        self.number = 0

    def load_adapter(self, slots: Sequence[int] = (1,)) -> float:
        """Seconds that it takes to load an adapter into these slots."""
        with tempfile.TemporaryDirectory() as folder:
            LoraWeights.create(self.decoder.shape, 32, 64.0).save(Path(folder), "random")
            start = time.perf_counter()
            for slot in slots:
                self.worker.obey(LoadPolicy(slot, slot, Path(folder)))
            wait()
            return time.perf_counter() - start

    def add(self, batch: int, new_tokens: int, slots: Sequence[int] = (0,), **params: Any) -> None:
        """Requests for the policies of these slots in turn."""
        for i in range(batch):
            self.number += 1
            job = request(random_prompt(CUDA_PROMPT, self.decoder.shape.vocab), new_tokens, self.number, **params)
            slot = slots[i % len(slots)]
            self.worker.obey(Add(self.number, job, slot, slot))

    def drain(self) -> tuple[int, float]:
        """Step until nothing is left; returns the tokens drawn, and the median seconds of the steps without prompts.

        A step lasts from the end of the one before it: the device may compute all the while.
        """
        tokens, decode, end = 0, [], time.perf_counter()
        scheduler = self.worker.scheduler
        while not scheduler.idle:
            reading = any(s.remaining > 1 for s in [*scheduler.running, *scheduler.waiting])
            tokens += sum(len(batch) for batch in self.worker.step().tokens.values())
            start, end = end, time.perf_counter()
            if not reading:
                decode.append(end - start)
        return tokens, median(decode) if decode else 0.0

    def run(
        self, batch: int, slots: Sequence[int] = (0,), run_ahead: bool = True, rounds: int = 3, **params: Any
    ) -> tuple[float, float]:
        """Tokens per second with prompts, and seconds of a decode step: the best of some rounds."""
        self.worker.run_ahead = run_ahead
        rates, steps = [], []
        for _ in range(rounds):
            self.add(batch, CUDA_TOKENS, slots, **params)
            start = time.perf_counter()
            tokens, step = self.drain()
            rates.append(tokens / (time.perf_counter() - start))
            steps.append(step)
        return max(rates), min(steps)

    def first_tokens(self, batch: int, slots: Sequence[int] = (0,)) -> float:
        """Seconds until every request of a batch has its first token: the best of three."""
        seconds = []
        for _ in range(3):
            self.add(batch, 1, slots)
            seconds.append(timed(self.drain))
        return min(seconds)


def step_bytes(engine: CudaEngine, batch: int) -> int:
    """What a decode step has to read: the weights, and the keys and values of sequences that are half answered."""
    context = CUDA_PROMPT + CUDA_TOKENS // 2
    return engine.decoder.weight_bytes + batch * context * 2 * QWEN3_4B.layers * QWEN3_4B.kv_size * 2


def first_token_flops(batch: int) -> float:
    """The least FLOPs before the first token of every request: all prompts through all layers, and a row of logits."""
    shape, tokens = QWEN3_4B, batch * CUDA_PROMPT
    weights = shape.layers * sum(a * b for a, b in map(shape.projection_sizes, PROJECTIONS))
    attention = shape.layers * 2 * CUDA_PROMPT * shape.q_size
    return tokens * (2 * weights + attention) + 2 * batch * shape.vocab * shape.hidden


def copy_bandwidth() -> float:
    """Bytes per second of a large copy on the device, read and written bytes counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize()
    seconds = timed(lambda: ([target.copy_(source) for _ in range(10)], torch.cuda.synchronize()))
    return 10 * 2 * source.nbytes / seconds
