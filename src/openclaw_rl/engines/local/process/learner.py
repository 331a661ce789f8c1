"""The local engine's learner as the server sees it: training primitives that a worker process carries out."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from openclaw_rl.engines.base import (
    EngineAway,
    EngineUnavailable,
    LearnerCapabilities,
    PassResult,
    PolicyRef,
    SpanLogprobs,
    StepLost,
    StepRefused,
    StepStopped,
    WeightForm,
    policy_in,
)
from openclaw_rl.engines.local.process.launcher import EXIT_SECONDS, Launcher, ProcessLauncher, WorkerLink, on_nodes
from openclaw_rl.engines.local.process.worker_messages import (
    Broken,
    Done,
    LearnerOptions,
    LearnerReport,
    Meeting,
    RankPlace,
    Refused,
    Started,
    TrainerCall,
)
from openclaw_rl.engines.transaction import TransactionalLearner
from openclaw_rl.types import TrainingSequence

WORKER = "openclaw_rl.engines.local.process.learner_worker"
#: Threads give up their core at once, because serving needs it. On 2 cores that write 4 answers, a step of 1,000 tokens
#: then takes 19 s instead of 74, and the answers are no slower.
SPINS = 0
DIED = "The learner's process ended while it was working; if it ran out of memory, lower --micro-batch-tokens."


class RankLinks:
    """Implements `WorkerLink` with one link for each rank.

    - Every rank gets every command. There is one report for each, once all ranks have answered: a refusal if any
      rank refuses, otherwise the first rank's answer.
    - When one rank is gone, the reports end. Closing ends all ranks, also those that wait for the one that is gone.
    """

    def __init__(self, links: Sequence[WorkerLink]) -> None:
        self.links = links
        self._is_broken = False

    @property
    def pids(self) -> list[int]:
        return [pid for link in self.links for pid in link.pids]

    @property
    def nodes(self) -> list[str]:
        return [node for link in self.links for node in link.nodes]

    @property
    def end(self) -> str:
        ends = [f"Rank {number}: {link.end}" for number, link in enumerate(self.links) if link.end]
        # A rank that loses another one leaves too, with an exit code: what ended the other is the cause.
        return next((end for end in ends if "exit code" not in end), ends[0] if ends else "")

    def send(self, command: Any) -> None:
        for link in self.links:
            link.send(command)

    def interrupt(self) -> None:
        for link in self.links:
            link.interrupt()

    def pause(self, *, paused: bool) -> None:
        """Ranks have devices of their own, and wait for each other only for a while."""

    async def reports(self) -> AsyncIterator[LearnerReport]:
        arrived: asyncio.Queue[tuple[int, LearnerReport | None]] = asyncio.Queue()

        async def read(number: int, link: WorkerLink) -> None:
            async for report in link.reports():
                arrived.put_nowait((number, report))
            arrived.put_nowait((number, None))

        readers = [asyncio.create_task(read(number, link)) for number, link in enumerate(self.links)]
        waiting: list[deque[LearnerReport]] = [deque() for _ in self.links]
        try:
            while True:
                number, report = await arrived.get()
                if report is None:
                    self._is_broken = True
                    # Now, so that `end` knows how it ended before the others are killed.
                    await self.links[number].close()
                    return
                if isinstance(report, Broken):
                    yield report
                    return
                if isinstance(report, Meeting):
                    for link in self.links[1:]:
                        link.send(report)
                    continue
                waiting[number].append(report)
                if all(waiting):
                    yield as_one([queue.popleft() for queue in waiting])
        finally:
            for reader in readers:
                reader.cancel()

    async def close(self, patience: float = EXIT_SECONDS) -> None:
        # Ranks that wait for one that is gone do not notice that their pipes are closed.
        patience = 0.0 if self._is_broken else patience
        await asyncio.gather(*(link.close(patience) for link in self.links))


def as_one(answers: Sequence[LearnerReport]) -> LearnerReport:
    """The answer of all ranks to one command."""
    started = [answer for answer in answers if isinstance(answer, Started)]
    if started:
        return replace(started[0], devices=tuple(device for answer in started for device in answer.devices))
    return next((answer for answer in answers if isinstance(answer, Refused)), answers[0])


class LearnerProcess:
    """Implements `TrainingPrimitives` with one worker process, or with several ranks that work as one.

    - Calls are carried out in their order.
    - If a process dies, the others are ended too. The calls that wait for it raise EngineUnavailable; if none waits,
      the next call does.
    - The call after that starts new processes, which have no snapshot and the base model as their policy.
    """

    def __init__(self, options: LearnerOptions, weights: Callable[[], bytes | None], launcher: Launcher) -> None:
        """`weights` returns the base weights that the sampler shares at the moment, if it does."""
        self.options = options
        self._weights = weights
        self._launcher = launcher
        self.weight_bytes = 0
        self._devices: tuple[str, ...] = ()
        """Of the ranks that were started last."""
        self._link: WorkerLink | None = None
        self._waiting: deque[asyncio.Future[LearnerReport]] = deque()
        """One for each report that the process owes."""
        self._reading: asyncio.Task[None] | None = None
        self._submitting = asyncio.Lock()
        self._line = ""
        """The line whose policy the process trains; empty where there are no lines."""
        self._held: set[str] = set()
        """The lines whose policies the process holds."""

    @property
    def pids(self) -> list[int]:
        """The processes, one for each rank; none before they are started."""
        return self._link.pids if self._link else []

    @property
    def pid(self) -> int | None:
        """The process that writes files."""
        return self.pids[0] if self.pids else None

    @property
    def capabilities(self) -> LearnerCapabilities:
        return LearnerCapabilities(frozenset([WeightForm.PEFT if self.options.rank else WeightForm.MODEL]))

    @property
    def has_dropout(self) -> bool:
        return bool(self.options.rank and self.options.dropout)

    def describe(self) -> str:
        ranks = self.options.ranks
        where = f" on {', '.join(dict.fromkeys(self._devices))}" if self._devices else ""
        where += on_nodes(self._link.nodes if self._link else [])
        if ranks is None:
            return f"local, one process{where}"
        return f"local, {len(ranks.devices)} ranks{where}{', weights sharded' if ranks.shards else ''}"

    async def start(self) -> None:
        async with self._submitting:
            await self._ready()

    async def close(self) -> None:
        if self._link is not None:
            link = self._link
            self._link = None
            # A step that is under way is not worth waiting for.
            await link.close(patience=0.0)
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def select(self, line: str) -> None:
        """Let the calls that follow be about a line."""
        if line != self._line or self._link is None:
            await self._call("select", line=line)
            self._line = line

    async def drop(self, line: str) -> None:
        """Hold the policy of a line no longer."""
        held = line in self._held
        self._held.discard(line)
        if held and self._link is not None:
            await self._call("drop", line=line)
            self._line = "" if line == self._line else self._line

    def _check_held(self) -> None:
        """Raise EngineAway if the policy of the line is not there: the process was started again since."""
        if self._line and self._line not in self._held:
            raise EngineAway("The learner's process was started again, so it loads the line again.")

    async def reset(self) -> None:
        await self._call("reset")
        self._held.add(self._line)

    def stop_step(self) -> None:
        if self._link is not None:
            self._link.interrupt()

    def pause_step(self, *, paused: bool) -> None:
        if self._link is not None:
            self._link.pause(paused=paused)

    async def forward_backward(self, sequences: Sequence[TrainingSequence]) -> PassResult:
        result: PassResult = await self._call("forward_backward", sequences=sequences)
        return result

    async def optim_step(self) -> float:
        norm: float = await self._call("optim_step")
        return norm

    async def snapshot(self) -> str:
        self._check_held()
        # Here, so that it is the same on every rank and never that of an earlier process.
        name = uuid4().hex
        await self._call("snapshot", name=name)
        return name

    async def restore(self, snapshot: str) -> None:
        await self._call("restore", name=snapshot)

    async def score(self, sequences: Sequence[TrainingSequence], *, base: bool = False) -> SpanLogprobs:
        logprobs: SpanLogprobs = await self._call("score", sequences=sequences, base=base)
        return logprobs

    async def write_policy(self, folder: Path) -> PolicyRef:
        self._check_held()
        await self._call("write_policy", folder=folder)
        return policy_in(folder)

    async def save(self, folder: Path, steps: int, *, lasting: bool = True) -> None:
        self._check_held()
        await self._call("save", folder=folder, steps=steps)

    async def load(self, folder: Path) -> int:
        steps: int = await self._call("load", folder=folder)
        self._held.add(self._line)
        return steps

    async def _call(self, method: str, **arguments: Any) -> Any:
        async with self._submitting:
            link = await self._ready()
            link.send(TrainerCall(method, arguments))
            waiting = self._expect_report()
        report = await waiting
        if isinstance(report, Refused):
            refusal = StepStopped(report.reason) if report.stopped else StepRefused(report.reason)
            raise StepLost(refusal) if report.may_pass else refusal
        assert isinstance(report, Done)
        return report.result

    async def _ready(self) -> WorkerLink:
        """The running process; starts one if there is none."""
        if self._reading is not None and self._reading.done() and self._link is not None:
            link = self._link
            self._link = None
            raise died(link)
        if self._link is None:
            self._line, self._held = "", set()
            self._waiting = deque()
            link = self._link = await self._start()
            self._reading = asyncio.create_task(self._read(link, self._waiting))
            report = await self._expect_report()
            if not isinstance(report, Started):
                await self.close()
                raise EngineUnavailable(report.reason if isinstance(report, Broken) else DIED)
            self.weight_bytes = report.weight_bytes
            self._devices = report.devices
        return self._link

    async def _start(self) -> WorkerLink:
        """Start the process, or all ranks. Raises OSError."""
        options = replace(self.options, shared=self._weights())
        ranks = self.options.ranks
        if ranks is None:
            return self._launcher.start(WORKER, options, options.device)
        links: list[WorkerLink] = []
        try:
            for number, device in enumerate(ranks.devices):
                place = RankPlace(number, len(ranks.devices), ranks.shards, self._launcher.meeting_host)
                links.append(self._launcher.start(WORKER, replace(options, device=device, place=place), device))
        except OSError:
            await RankLinks(links).close(patience=0.0)
            raise
        return RankLinks(links)

    def _expect_report(self) -> "asyncio.Future[LearnerReport]":
        waiting: asyncio.Future[LearnerReport] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        return waiting

    async def _read(self, link: WorkerLink, waiting: "deque[asyncio.Future[LearnerReport]]") -> None:
        """Give each report to the call that waits for it, until the process ends."""
        async for report in link.reports():
            call = waiting.popleft()
            if not call.done():
                call.set_result(report)
        await link.close()
        if waiting and self._link is link:
            self._link = None
        for call in waiting:
            if not call.done():
                call.set_exception(died(link))


def died(link: WorkerLink) -> EngineUnavailable:
    return EngineUnavailable(f"{DIED} {link.end}".rstrip())


class LineCalls:
    """Lets one call of one line run at a time, with the policy of the line in the process."""

    def __init__(self, process: LearnerProcess, lock: asyncio.Lock, line: str) -> None:
        self.process = process
        self.lock = lock
        self.line = line

    async def __aenter__(self) -> None:
        await self.lock.acquire()
        try:
            await self.process.select(self.line)
        except BaseException:
            self.lock.release()
            raise

    async def __aexit__(self, *error: object) -> None:
        self.lock.release()


class LocalLearner(TransactionalLearner):
    """The local engine's `Learner`: whole steps, carried out by a process of its own, for one line or for several."""

    def __init__(
        self,
        options: LearnerOptions,
        weights: Callable[[], bytes | None] = lambda: None,
        launcher: Launcher | None = None,
    ) -> None:
        """`weights` returns the base weights that the sampler shares at the moment, if it does."""
        self.process = LearnerProcess(options, weights, launcher or ProcessLauncher(SPINS))
        self._lock = asyncio.Lock()
        super().__init__(self.process, options.training, self._lock)

    def for_line(self, line: str) -> TransactionalLearner:
        return TransactionalLearner(self.process, self.settings, LineCalls(self.process, self._lock, line))

    async def drop_line(self, line: str) -> None:
        async with self._lock:
            await self.process.drop(line)

    async def erase(self, folder: Path, run_dir: Path) -> None:
        """Its files refer to nothing elsewhere."""
