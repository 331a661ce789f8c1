"""The sampler's worker process: commands in, tokens out, one model step at a time.

The worker knows nothing of HTTP or of text. It ends when its pipe closes, so it never outlives the server,
and it ignores Ctrl-C and SIGTERM, which may be sent to it too: when to stop is the server's decision.
"""

import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from openclaw_rl.engines.local.model.adapters import AdapterSlots, BadPolicy
from openclaw_rl.engines.local.model.decoder import Decoder, Shape, UnsupportedModel, load_decoder
from openclaw_rl.engines.local.model.shared_weights import share
from openclaw_rl.engines.local.process.sampler_messages import (
    Add,
    Cancel,
    Command,
    Failed,
    LoadPolicy,
    PolicyLoaded,
    Ready,
    RequestFailed,
    Score,
    Tokens,
    WorkerOptions,
)
from openclaw_rl.engines.local.sampling.draw import draw
from openclaw_rl.engines.local.sampling.kv_cache import CpuKVCache, CudaKVCache, bytes_per_page
from openclaw_rl.engines.local.sampling.pages import PAGE_SIZE, PagePool
from openclaw_rl.engines.local.sampling.runner import CudaRunner, PolicyWeights, Runner
from openclaw_rl.engines.local.sampling.scheduler import Scheduler, Sequence
from openclaw_rl.engines.local.sampling.scoring import Scoring
from openclaw_rl.engines.local.training.full_weights import ModelSlots
from openclaw_rl.types import Priority, SampledToken, SamplingParams, Scores

log = logging.getLogger(__name__)

#: Commands that are about one request.
ForRequest = Add | Score | Cancel

#: Prompt tokens read per step. On a CPU, about a quarter of a second, the longest that others wait for a token;
#: on CUDA, enough to keep the device busy.
PREFILL_TOKENS = {"cpu": 128, "cuda": 4096}
#: The least of those that one prompt gets: on CUDA, many small pieces would be many small kernels.
PREFILL_SHARE = {"cpu": 16, "cuda": 512}
#: Share of the memory (on CUDA, of what is free once the weights are there) that the cache takes when no size
#: is given; the rest is for activations and learning.
CACHE_SHARE = {"cpu": 0.25, "cuda": 0.6}
#: More would be waste on a laptop: 4 GiB are 93,000 tokens of the embedded model.
MAX_CPU_CACHE_BYTES = 4 << 30
#: Contexts longer than this need --max-context-tokens, so that one request cannot take the whole cache.
DEFAULT_MAX_CONTEXT = 32768


class Worker:
    """The model with its scheduler: one `step` draws one token of every sequence that is ready for it."""

    def __init__(self, decoder: Decoder, options: WorkerOptions) -> None:
        device, dtype = decoder.embed.device, decoder.embed.dtype
        shape = decoder.shape
        pages = cache_bytes(options, device) // bytes_per_page(shape, dtype)
        self.max_context = context_limit(options, shape, pages * PAGE_SIZE)
        self.policies = slots_for(decoder, options)
        self.runner = self._runner(decoder, pages, options)
        pool = PagePool(pages, consecutive=device.type == "cpu")
        self.scheduler = Scheduler(pool, options.max_sequences, PREFILL_TOKENS[device.type], PREFILL_SHARE[device.type])
        self.loaded = {0}
        self.loading: deque[tuple[LoadPolicy, Iterator[None]]] = deque()
        self.held: list[ForRequest] = []
        """What came for a policy that was still being loaded, and what was said of it since."""
        self.arrivals = 0

    def _runner(self, decoder: Decoder, pages: int, options: WorkerOptions) -> Runner:
        device = decoder.embed.device
        if device.type == "cpu":
            return Runner(decoder, CpuKVCache(decoder.shape, pages, decoder.embed.dtype), self.policies)
        from openclaw_rl.engines.local.model import kernels

        decoder.ops = kernels
        cache = CudaKVCache(decoder.shape, pages, decoder.embed.dtype, device)
        runner = CudaRunner(decoder, cache, self.policies, options.max_sequences, self.max_context)
        runner.warm_up()
        return runner

    def obey(self, command: Command) -> PolicyLoaded | RequestFailed | None:
        if not isinstance(command, LoadPolicy) and self._must_wait(command):
            self.held.append(command)
            return None
        match command:
            case Add():
                return self._add(command)
            case Score():
                return self._score(command)
            case Cancel(id, index):
                self.scheduler.cancel(id, index)
            case LoadPolicy():
                return self._load(command)
        return None

    def _must_wait(self, command: ForRequest) -> bool:
        """Whether its policy is still being loaded; who is to be cancelled may be among those that wait for one."""
        if isinstance(command, Cancel):
            return any(other.id == command.id for other in self.held)
        return any(load.slot == command.slot for load, _ in self.loading)

    def due(self) -> list[ForRequest]:
        """Commands that need not be held any longer, as their policy is there or has failed; to be obeyed now."""
        waited, self.held = self.held, []
        due: list[ForRequest] = []
        for command in waited:
            (self.held if self._must_wait(command) else due).append(command)
        return due

    def step(self) -> Tokens:
        """Run the next batch and draw what can be drawn."""
        work = self.scheduler.plan()
        logits = self.runner.run(work)
        self.scheduler.commit(work)
        drawing = [item.sequence for item in work if item.draws]
        tokens: dict[int, list[SampledToken]] = {}
        cached: dict[int, int] = {}
        if drawing:
            draws = draw(logits, [s.params for s in drawing], [s.rng.random() for s in drawing])
            for row, sequence in enumerate(drawing):
                finish = sequence.append(draws.tokens[row])
                token = SampledToken(sequence.index, draws.tokens[row], draws.logprobs[row], draws.top[row], finish)
                if len(sequence.tokens) == sequence.prompt_length + 1:
                    cached[sequence.request] = max(cached.get(sequence.request, 0), sequence.cached)
                tokens.setdefault(sequence.request, []).append(token)
                if finish is not None:
                    self.scheduler.finish(sequence)
        scores = {item.sequence.request: self._scores(item.sequence) for item in work if item.ends and not item.draws}
        return Tokens(tokens, cached, scores, len(self.scheduler.running))

    def _scores(self, sequence: Sequence) -> Scores:
        """A scoring sequence has been read: it leaves the batch."""
        assert sequence.scoring is not None
        self.scheduler.finish(sequence)
        return sequence.scoring.scores()

    def _add(self, command: Add) -> RequestFailed | None:
        request = command.request
        if command.slot not in self.loaded:
            return not_loaded(command.id, command.version)
        self.arrivals += 1
        self.scheduler.add(
            Sequence(
                request=command.id,
                index=index,
                tokens=list(request.prompt_ids),
                params=request.params,
                version=command.version,
                slot=command.slot,
                order=(int(request.priority), self.arrivals),
            )
            for index in range(request.n)
        )
        return None

    def _score(self, command: Score) -> RequestFailed | None:
        request = command.request
        if command.slot not in self.loaded:
            return not_loaded(command.id, request.version)
        self.arrivals += 1
        self.scheduler.add(
            [
                Sequence(
                    request=command.id,
                    index=0,
                    tokens=list(request.ids[:-1]),
                    params=SamplingParams(max_tokens=0),
                    version=request.version,
                    slot=command.slot,
                    order=(int(Priority.BACKGROUND), self.arrivals),
                    scoring=Scoring(request),
                )
            ]
        )
        return None

    def _load(self, command: LoadPolicy) -> PolicyLoaded | None:
        try:
            pieces = self.policies.load(command.slot, command.folder)
        except BadPolicy as error:
            return PolicyLoaded(command.version, str(error))
        self.loaded.discard(command.slot)
        self.loading.append((command, pieces))
        return self.load_on()

    def load_on(self) -> PolicyLoaded | None:
        """Read the next piece of the policy that is being loaded; tells when it is there."""
        command, pieces = self.loading[0]
        try:
            for _ in pieces:
                return None
        except BadPolicy as error:
            self.loading.popleft()
            return PolicyLoaded(command.version, str(error))
        self.loading.popleft()
        self.loaded.add(command.slot)
        return PolicyLoaded(command.version)


def slots_for(decoder: Decoder, options: WorkerOptions) -> PolicyWeights:
    """Room for the policies that will be served beside the base model."""
    if not options.lora_rank:
        return ModelSlots(decoder, options.policy_slots)
    weights = decoder.embed
    return AdapterSlots(decoder.shape, options.policy_slots, options.lora_rank, weights.dtype, weights.device)


def not_loaded(id: int, version: int) -> RequestFailed:
    return RequestFailed(id, f"Policy version {version} could not be loaded again.")


def main(connection: Connection, options: WorkerOptions) -> None:
    """The process: load, then serve until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # When the server is gone, there is nobody to tell and nothing to do.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            device, dtype = placement(options.device, options.dtype)
            decoder, shared = share(load_decoder(options.model, dtype, device))
            worker = Worker(decoder, options)
        except Exception as error:
            log.debug("loading failed", exc_info=True)
            connection.send(Failed(f"The model in {options.model} could not be loaded: {describe(error)}"))
            return
        connection.send(
            Ready(
                device=str(device),
                dtype=str(dtype).removeprefix("torch."),
                max_context=worker.max_context,
                cache_tokens=worker.scheduler.pool.pages * PAGE_SIZE,
                weight_bytes=weight_bytes(decoder),
                shared=shared,
            )
        )
        serve(connection, worker)


def describe(error: Exception) -> str:
    """An error in words; those that were not meant for users with their name."""
    return f"{error}." if isinstance(error, UnsupportedModel) else f"{type(error).__name__}: {error}."


def serve(connection: Connection, worker: Worker) -> None:
    """Obey what has come, load a piece of a policy, take a step; sleep on the pipe while there is nothing to do."""
    while True:
        while (worker.scheduler.idle and not worker.loading) or connection.poll():
            report(connection, worker, worker.obey(connection.recv()))
        if worker.loading:
            report(connection, worker, worker.load_on())
        if not worker.scheduler.idle:
            connection.send(worker.step())


def report(connection: Connection, worker: Worker, answer: PolicyLoaded | RequestFailed | None) -> None:
    """Send what there is to say, and at once obey what waited for a policy that it may be about."""
    for said in (answer, *map(worker.obey, worker.due())):
        if said is not None:
            connection.send(said)


def placement(name: str, precision: str) -> tuple[torch.device, torch.dtype]:
    """Where the model runs and in which precision, each of which may be auto."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise UnsupportedModel("--device cuda was asked for, but PyTorch sees no CUDA device")
    dtype = precision if precision != "auto" else {"cpu": "float32", "cuda": "bfloat16"}[name]
    return torch.device(name), getattr(torch, dtype)


def context_limit(options: WorkerOptions, shape: Shape, cache_tokens: int) -> int:
    """The longest prompt and answer together; refuses what was asked for and cannot be had."""
    asked = options.max_context
    if asked is not None and asked > shape.max_context:
        raise UnsupportedModel(f"--max-context-tokens {asked} is more than the model's {shape.max_context}")
    if cache_tokens < (asked or PAGE_SIZE):
        raise UnsupportedModel(
            f"the memory for keys and values holds {cache_tokens} tokens, fewer than one request may need; "
            "raise --kv-cache-gib or lower --max-context-tokens"
        )
    return asked or min(shape.max_context, DEFAULT_MAX_CONTEXT, cache_tokens)


def cache_bytes(options: WorkerOptions, device: torch.device) -> int:
    """How much memory the keys and values may take."""
    if options.cache_gib is not None:
        return int(options.cache_gib * (1 << 30))
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        return int(free * CACHE_SHARE["cuda"])
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(memory * CACHE_SHARE["cpu"]), MAX_CPU_CACHE_BYTES)


def weight_bytes(decoder: Decoder) -> int:
    """Memory of the base weights; a tied head is counted once."""
    tensors = [decoder.embed, decoder.norm, decoder.head.weight]
    for layer in decoder.layers:
        tensors += [layer.input_norm, layer.post_norm]
        tensors += [p.weight for p in (layer.qkv, layer.o, layer.gate_up, layer.down)]
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())
