"""The sampler's worker process: commands in, tokens out, one model step at a time.

The worker knows nothing of HTTP or of text. It exits when its pipe closes, so it never outlives the server.
It ignores Ctrl-C and SIGTERM, which a terminal also sends to it: the server decides when to stop.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Rows
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import torch

from openclaw_rl.engines.base import ConstraintRefused
from openclaw_rl.engines.constraints import Allowed, Compiler
from openclaw_rl.engines.local.families import has_own_decoder
from openclaw_rl.engines.local.model.agreement import COMPARED_TOKENS, check_agreement
from openclaw_rl.engines.local.model.cpu_precision import ChosenDtype, choose_on_cpu
from openclaw_rl.engines.local.model.decoder import Decoder
from openclaw_rl.engines.local.model.language_model import LanguageModel, Sizes
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.packed import PackedDecoder, Way, packed, packed_bytes, ways_for
from openclaw_rl.engines.local.model.placement import describe, find_device, free_memory, name_of, placement
from openclaw_rl.engines.local.model.policy_slots import AdapterSlots, BadPolicy, ModelSlots
from openclaw_rl.engines.local.model.shared_weights import share
from openclaw_rl.engines.local.model.transformers_decoder import TransformersDecoder, load_language_model
from openclaw_rl.engines.local.model.transformers_sizes import TransformersSizes
from openclaw_rl.engines.local.process.worker_messages import (
    Add,
    Cancel,
    Command,
    Failed,
    LoadPolicy,
    Packed,
    PolicyLoaded,
    Ready,
    RequestFailed,
    Score,
    Tokens,
    WorkerOptions,
)
from openclaw_rl.engines.local.sampling.page_pool import PAGE_SIZE, PagePool
from openclaw_rl.engines.local.sampling.runner import (
    PolicyWeights,
    RanStep,
    RowKVCache,
    Runner,
    StateRunner,
    TorchRunner,
    bytes_per_page,
)
from openclaw_rl.engines.local.sampling.scheduler import Scheduler, Scoring, Sequence
from openclaw_rl.models import BadModelFolder, read_json_object
from openclaw_rl.types import Priority, SampledToken, SamplingParams, Scores

#: Share of the memory that is free once the weights are loaded, which the cache takes if no size is given; the rest is
#: for activations and training.
CACHE_SHARE = {"cpu": 0.25, "cuda": 0.6}
#: More would be wasted on a laptop: 4 GiB hold 93,000 tokens of the embedded model.
MAX_CPU_CACHE_BYTES = 4 << 30
#: Contexts longer than this need --max-context-tokens, so that one request cannot take the whole cache.
DEFAULT_MAX_CONTEXT = 32768
#: The same for models whose prompts are read in one step, during which everybody else waits.
DEFAULT_STATE_CONTEXT = 4096
#: The niceness of packing the weights, beside steps.
PACKING_NICENESS = 10
log = logging.getLogger(__name__)
#: Commands that are about one request.
ForRequest = Add | Score | Cancel
#: Prompt tokens computed per step. On a CPU they take about a third of a second, the longest that others wait for a
#: token; with fewer, PyTorch's attention takes smaller blocks and is slower. On CUDA they keep the device busy.
PREFILL_TOKENS = {"cpu": 192, "cuda": 4096}
#: Of those, the ones of background work: who asks while such a step runs waits for its end.
BACKGROUND_TOKENS = {"cpu": 64, "cuda": 4096}
#: The smallest share of those that one prompt gets: on CUDA, many small pieces would be many small kernels.
PREFILL_SHARE = {"cpu": 16, "cuda": 512}


def context_limit(options: WorkerOptions, shape: Sizes, cache_tokens: int, default: int) -> int:
    """The longest prompt and answer together. Raises UnsupportedModel if the options ask for more than is possible."""
    asked = options.max_context
    if asked is not None and asked > shape.max_context:
        raise UnsupportedModel(f"--max-context-tokens {asked} is more than the model's {shape.max_context}")
    if cache_tokens < (asked or PAGE_SIZE):
        raise UnsupportedModel(
            f"the memory for keys and values holds {cache_tokens} tokens, fewer than one request may need; "
            "raise --kv-cache-gib or lower --max-context-tokens"
        )
    return asked or min(shape.max_context, default, cache_tokens)


def cache_bytes(options: WorkerOptions, device: torch.device) -> int:
    """How much memory the keys and values may take."""
    if options.cache_gib is not None:
        return int(options.cache_gib * (1 << 30))
    room = int(free_memory(device) * CACHE_SHARE[kind_of(device)])
    return room if device.type == "cuda" else min(room, MAX_CPU_CACHE_BYTES)


def kind_of(device: torch.device) -> str:
    """Whose row of the tables above counts: an Apple GPU, which has not been measured, uses the machine's memory."""
    return "cuda" if device.type == "cuda" else "cpu"


def allowed_tokens(drawing: Rows[Sequence]) -> tuple[dict[int, Allowed], dict[int, str]]:
    """What the constrained rows may draw; and why a request's constraint cannot be enforced any further, by request."""
    allowed: dict[int, Allowed] = {}
    refused: dict[int, str] = {}
    for row, sequence in enumerate(drawing):
        if sequence.automaton is None:
            continue
        try:
            allowed[row] = sequence.automaton.allowed()
        except ConstraintRefused as error:
            refused[sequence.request] = str(error)
    return allowed, refused


class Worker:
    """The model with its scheduler. One `step` draws a token of every sequence that is ready for it.

    `run_ahead`: whether a step may be started before the tokens of the one before it are known. None: on CUDA, where
    the host plans while the device computes.
    """

    def __init__(self, decoder: LanguageModel, options: WorkerOptions, run_ahead: bool | None = None) -> None:
        device = decoder.embed.device
        dtype = decoder.activation_dtype
        shape = decoder.shape
        room = cache_bytes(options, device)
        max_sequences = options.max_sequences
        pages = room // bytes_per_page(shape, dtype)
        if isinstance(shape, TransformersSizes) and shape.state is not None:
            max_sequences = max(1, min(max_sequences, room // 2 // shape.state.fixed))
            pages = (room - max_sequences * shape.state.fixed) // (PAGE_SIZE * shape.state.per_token)
        default = DEFAULT_MAX_CONTEXT if decoder.mixes_sequences else DEFAULT_STATE_CONTEXT
        self.max_context = context_limit(options, shape, pages * PAGE_SIZE, default)
        self.policies = slots_for(decoder, options)
        self.ways: list[Way] = []
        """How its weights may be packed, the best way first."""
        self.runner = self._runner(decoder, pages, options)
        pool = PagePool(pages, consecutive=self.runner.wants_consecutive_pages)
        tokens = (table[kind_of(device)] for table in (PREFILL_TOKENS, PREFILL_SHARE, BACKGROUND_TOKENS))
        self.scheduler = Scheduler(pool, max_sequences, *tokens, apart=not decoder.mixes_sequences)
        self.run_ahead = not isinstance(self.runner, TorchRunner) if run_ahead is None else run_ahead
        self.ahead: RanStep | None = None
        """The next step, if it has been started."""
        self.loaded = {0}
        self.loading: deque[tuple[LoadPolicy, Iterator[None]]] = deque()
        self.held: list[ForRequest] = []
        """Requests whose policy is being loaded or whose constraint is being compiled, and cancellations of them."""
        self.arrivals = 0
        self.woken, self._wake = Pipe(duplex=False)
        self.compiler = Compiler(options.model, shape.vocab, lambda: self._wake.send_bytes(b"compiled"))
        self.news: deque[Packed] = deque()
        self.is_closed = False

    def _runner(self, decoder: LanguageModel, pages: int, options: WorkerOptions) -> Runner:
        device = decoder.embed.device
        if isinstance(decoder, TransformersDecoder):
            return self._transformers_runner(decoder, pages, options.max_sequences)
        assert isinstance(decoder, Decoder)
        if device.type != "cuda":
            # Policies that train all weights have weights of their own, which change.
            if options.lora_rank:
                self.ways = ways_for(decoder, options.pack_weights, options.measurements)
            weights = decoder.embed.dtype if device.type == "cpu" else None
            cache = RowKVCache(decoder.shape, pages, decoder.activation_dtype, device, weights)
            return TorchRunner(decoder, cache, self.policies)
        # These import Triton, which not every machine has.
        from openclaw_rl.engines.local.sampling.cuda_forward import CudaKVCache
        from openclaw_rl.engines.local.sampling.cuda_runner import CudaRunner

        on_cuda = CudaKVCache(decoder.shape, pages, decoder.embed.dtype, device)
        graphs = CudaRunner(decoder, on_cuda, self.policies, options.max_sequences, self.max_context)
        graphs.warm_up()
        return graphs

    def _transformers_runner(self, decoder: TransformersDecoder, pages: int, max_sequences: int) -> Runner:
        device, dtype = decoder.embed.device, decoder.activation_dtype
        compared = min(COMPARED_TOKENS, self.max_context)
        if device.type == "cuda" and decoder.mixes_sequences:
            from openclaw_rl.engines.local.sampling.transformers_runner import TransformersRunner

            cache = RowKVCache(decoder.shape, pages + 1, dtype, device)
            graphs = TransformersRunner(decoder, cache, self.policies, max_sequences, self.max_context)
            graphs.warm_up()
            check_agreement(decoder, graphs.in_pieces, compared)
            return graphs
        if decoder.mixes_sequences:
            runner = TorchRunner(decoder, RowKVCache(decoder.shape, pages, dtype, device), self.policies)
        else:
            runner = StateRunner(decoder, self.policies)
        check_agreement(decoder, runner.in_pieces, compared)
        return runner

    def pack(self) -> None:
        """Have the steps from now on computed with packed weights, if that helps. Others may take steps meanwhile."""
        decoder = self.runner.decoder
        if isinstance(decoder, Decoder):
            self.runner.decoder = decoder = packed(decoder, self.ways, lambda: not self.is_closed)
        dtype = name_of(decoder.way.dtype) if isinstance(decoder, PackedDecoder) and decoder.way else ""
        self.news.append(Packed(packed_bytes(decoder), dtype))
        self._wake.send_bytes(b"packed")

    @property
    def busy(self) -> bool:
        """Whether there is a step to take or a policy to load."""
        return not self.scheduler.idle or bool(self.loading)

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
        """Whether its policy is being loaded or its constraint compiled. A cancellation waits behind its request."""
        if isinstance(command, Cancel):
            return any(other.id == command.id for other in self.held)
        constraint = command.request.constraint if isinstance(command, Add) else None
        if constraint is not None and not self.compiler.has_result(constraint):
            return True
        return any(load.slot == command.slot for load, _ in self.loading)

    def due(self) -> list[ForRequest]:
        """Commands to obey now, because they have to wait no longer."""
        held = self.held
        self.held = []
        due: list[ForRequest] = []
        for command in held:
            (self.held if self._must_wait(command) else due).append(command)
        return due

    def step(self) -> Tokens:
        """Run the next batch, and draw the next token of each sequence that has been read.

        If what it draws does not change the batch after it, that one is started first, and runs until the next call.
        """
        launched = self._launch()
        following = self.scheduler.plan_ahead(launched.work) if self.run_ahead else []
        self.ahead = self.runner.run(following, launched) if following else None
        return self._collect(launched)

    def _launch(self) -> RanStep:
        """The next step, started now unless it has been already. Its tokens are in the cache for all that follows."""
        launched = self.ahead
        self.ahead = None
        if launched is None or not self.scheduler.still_running(launched.work):
            launched = self.runner.run(self.scheduler.plan())
        self.scheduler.commit(self.scheduler.still_running(launched.work))
        return launched

    def _collect(self, launched: RanStep) -> Tokens:
        """Wait for a step's tokens, and hand them to those sequences that have not ended since it was started."""
        work = self.scheduler.still_running(launched.work)
        drawing = launched.drawing
        staying = {item.sequence for item in work}
        tokens: dict[int, list[SampledToken]] = {}
        cached: dict[int, int] = {}
        allowed, refused = allowed_tokens(drawing)
        if drawing:
            draws = launched.draw({row: choice.mask for row, choice in allowed.items()})
            for row, sequence in enumerate(drawing):
                if sequence.request in refused or sequence not in staying:
                    continue
                finish = sequence.append(draws.tokens[row])
                forced = row in allowed and allowed[row].forced
                token = SampledToken(
                    sequence.index, draws.tokens[row], draws.logprobs[row], draws.top[row], finish, forced
                )
                if len(sequence.tokens) == sequence.prompt_length + 1:
                    cached[sequence.request] = max(cached.get(sequence.request, 0), sequence.cached)
                tokens.setdefault(sequence.request, []).append(token)
                if finish is not None:
                    self.scheduler.finish(sequence)
        scores = {item.sequence.request: self._scores(item.sequence) for item in work if item.ends and not item.draws}
        for request in refused:
            self.scheduler.cancel(request)
        return Tokens(tokens, cached, scores, len(self.scheduler.running), refused)

    def _scores(self, sequence: Sequence) -> Scores:
        """The scores of a sequence that has been read; it leaves the batch."""
        assert sequence.scoring is not None
        self.scheduler.finish(sequence)
        return sequence.scoring.scores()

    def _add(self, command: Add) -> RequestFailed | None:
        request = command.request
        if command.slot not in self.loaded:
            return not_loaded(command.id, command.version)
        try:
            automaton = None if request.constraint is None else self.compiler.automaton(request.constraint)
        except (ConstraintRefused, BadModelFolder) as error:
            return RequestFailed(command.id, str(error), refused=True)
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
                owner=request.owner,
                automaton=None if automaton is None else automaton.copy(request.params.stop_token_ids),
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
                    order=(max(int(Priority.BACKGROUND), int(request.priority)), self.arrivals),
                    scoring=Scoring(request),
                    owner=request.owner,
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
        """Load the next piece of a policy; the answer once all of it is loaded or it has failed."""
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


def choose_dtype(options: WorkerOptions) -> ChosenDtype:
    """The precision that the options ask for; auto on a CPU is decided here, once for sampler and learner."""
    if options.dtype != "auto" or find_device(options.device).type != "cpu":
        return ChosenDtype(options.dtype)
    if not has_own_decoder(read_json_object(options.model / "config.json")):
        return ChosenDtype("float32", "Transformers' code would round everything to bfloat16, not only weights")
    return choose_on_cpu(options.measurements)


def slots_for(decoder: LanguageModel, options: WorkerOptions) -> PolicyWeights:
    """Memory for the policies that are served in addition to the base model."""
    if not options.lora_rank:
        assert isinstance(decoder, Decoder)
        return ModelSlots(decoder, options.policy_slots)
    dtype = decoder.activation_dtype
    device = decoder.embed.device
    return AdapterSlots(decoder.shape, options.policy_slots, options.lora_rank, dtype, device)


def not_loaded(id: int, version: int) -> RequestFailed:
    return RequestFailed(id, f"Policy version {version} could not be loaded again.")


def main(connection: Connection, options: WorkerOptions) -> None:
    """The process: load, then serve until the pipe closes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if options.cuda_device:
        # PyTorch looks at the devices at its first use of one, which comes later.
        os.environ["CUDA_VISIBLE_DEVICES"] = options.cuda_device
    # When the server is gone, there is nothing left to do.
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            choice = choose_dtype(options)
            device, dtype = placement(options.device, choice.dtype)
            loaded = load_language_model(
                options.model, dtype, device, quantize=options.quantize, trusts_code=options.trusts_code
            )
            decoder, shared = share(loaded)
            worker = Worker(decoder, options)
        except Exception as error:
            log.debug("loading failed", exc_info=True)
            connection.send(Failed(f"The model in {options.model} could not be loaded: {describe(error)}"))
            return
        connection.send(
            Ready(
                device=str(device),
                dtype=name_of(dtype),
                max_context=worker.max_context,
                cache_tokens=worker.scheduler.pool.pages * PAGE_SIZE,
                weight_bytes=decoder.weight_bytes,
                dtype_reason=choice.reason,
                shared=shared,
            )
        )
        # This takes a second. The server is not yet serving, so nobody waits for it.
        with contextlib.suppress(BadModelFolder):
            worker.compiler.prepare()
        # This takes seconds, for which people need not wait.
        threading.Thread(target=pack_beside, args=[worker], name="packing").start()
        try:
            serve(connection, worker)
        finally:
            worker.is_closed = True


def pack_beside(worker: Worker) -> None:
    """Pack the weights in this thread, which leaves the processor to the others where that is possible."""
    if sys.platform == "linux":
        # Elsewhere it would count for all threads.
        os.nice(PACKING_NICENESS)
    worker.pack()


def serve(connection: Connection, worker: Worker) -> None:
    """Obey the commands that have come, load a piece of a policy, take a step. Wait on the pipes while idle."""
    while True:
        while ready := wait([connection, worker.woken], 0 if worker.busy else None):
            if worker.woken in ready:
                worker.woken.recv_bytes()
                report(connection, worker, worker.news.popleft() if worker.news else None)
            if connection in ready:
                report(connection, worker, worker.obey(connection.recv()))
        if worker.loading:
            report(connection, worker, worker.load_on())
        if not worker.scheduler.idle:
            connection.send(worker.step())


def report(connection: Connection, worker: Worker, answer: PolicyLoaded | RequestFailed | Packed | None) -> None:
    """Send an answer or news, and obey the commands that waited for the policy that it may be about."""
    for message in (answer, *map(worker.obey, worker.due())):
        if message is not None:
            connection.send(message)
