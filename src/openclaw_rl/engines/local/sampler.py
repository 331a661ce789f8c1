"""The local engine's sampler, seen from the server: a worker process behind the `Sampler` protocol.

Guarantees: a request that the worker has not answered when the worker dies fails with EngineUnavailable, the
worker is started again with the same adapters, and requests that come meanwhile wait for it. Nothing here
blocks the event loop: commands leave through a thread, reports come in when the pipe is readable.
"""

import asyncio
import logging
import multiprocessing
import queue
import threading
from collections.abc import AsyncIterator
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from openclaw_rl.engines.base import EngineLimits, EngineStats, EngineUnavailable, QueueFull
from openclaw_rl.engines.local.messages import (
    AdapterLoaded,
    Add,
    Cancel,
    Command,
    Failed,
    LoadAdapter,
    Ready,
    Report,
    Tokens,
    WorkerOptions,
)
from openclaw_rl.types import BASE_VERSION, SampledToken, SampleRequest

log = logging.getLogger(__name__)

#: A worker that dies this often in a row, each time before it was ready, will not come up by itself.
MAX_FAILED_STARTS = 3
#: Time a worker gets to leave by itself once its pipe is closed.
EXIT_SECONDS = 5.0

DIED = "The model's worker process stopped while it was working on this request. Please send it again."


class LocalSampler:
    """Implements `Sampler` with one worker process."""

    def __init__(self, options: WorkerOptions, max_queue: int) -> None:
        self.options, self.max_queue = options, max_queue
        self.ready: Ready | None = None
        self.newest_version = BASE_VERSION
        self.restarts = 0
        self._ids = count(1)
        self._streams: dict[int, LocalStream] = {}
        self._resident: dict[int, Path] = {}
        self._loading: dict[int, asyncio.Future[None]] = {}
        self._released = asyncio.Event()
        self._link: Link | None = None
        self._backlog: list[Command] = []
        self._active = 0
        self._failure = ""
        self._supervisor: asyncio.Task[None] | None = None

    @property
    def limits(self) -> EngineLimits:
        if self.ready is None:
            raise EngineUnavailable("The model is not loaded yet.")
        return EngineLimits(self.ready.max_context, self.options.max_sequences)

    @property
    def worker_pid(self) -> int | None:
        return self._link.process.pid if self._link else None

    def stats(self) -> EngineStats:
        outstanding = sum(stream.running for stream in self._streams.values())
        detail = self._failure or ("" if self._link else "The worker is starting.")
        # The worker reports when it steps, so after the last sequence has left its count is one step old.
        active = min(self._active, outstanding)
        return EngineStats(self._link is not None, active, outstanding - active, self.restarts, detail)

    async def start(self) -> None:
        ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(ready))
        await ready

    async def close(self) -> None:
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        self._fail_all("The server is shutting down.")

    def sample(self, request: SampleRequest) -> "LocalStream":
        if self._failure:
            raise EngineUnavailable(self._failure)
        outstanding = sum(stream.running for stream in self._streams.values())
        if outstanding + request.n > self.options.max_sequences + self.max_queue:
            raise QueueFull(max(0, outstanding - self.options.max_sequences))
        version = self.newest_version if request.version is None else request.version
        if version != BASE_VERSION and version not in self._resident:
            raise EngineUnavailable(f"Policy version {version} is not loaded.")
        stream = LocalStream(self, next(self._ids), version, request.n)
        self._streams[stream.id] = stream
        self._send(Add(stream.id, request, version))
        return stream

    async def publish(self, version: int, adapter: Path) -> None:
        drop = await self._place()
        done = self._loading[version] = asyncio.get_running_loop().create_future()
        if drop is not None:
            del self._resident[drop]
        self._send(LoadAdapter(version, adapter, drop))
        await done
        self._resident[version] = adapter
        self.newest_version = max(self.newest_version, version)

    async def _place(self) -> int | None:
        """The version that must make room: the oldest that nobody is served by; waits until there is one."""
        while len(self._resident) + len(self._loading) >= self.options.adapter_slots:
            used = {stream.version for stream in self._streams.values()} | {self.newest_version}
            unused = [version for version in sorted(self._resident) if version not in used]
            if unused:
                return unused[0]
            self._released.clear()
            await self._released.wait()
        return None

    def _send(self, command: Command) -> None:
        if self._link is None:
            self._backlog.append(command)
        else:
            self._link.send(command)

    def forget(self, stream: "LocalStream") -> None:
        """A stream ended; stop what is still running of it."""
        if self._streams.pop(stream.id, None) is not None and stream.running:
            self.cancel(stream.id)
        self._released.set()

    def cancel(self, id: int, index: int | None = None) -> None:
        """Stop a request or one of its completions in the worker."""
        self._send(Cancel(id, index))

    async def _supervise(self, first: asyncio.Future[None]) -> None:
        """Keep a worker running: start it, wait for its end, tell its requests, start it again."""
        failed_starts = 0
        while failed_starts < MAX_FAILED_STARTS:
            link = Link(self.options)
            reason = DIED
            try:
                async for report in link.reports():
                    self._receive(report, link)
                    if isinstance(report, Ready) and not first.done():
                        first.set_result(None)
                    if isinstance(report, Failed):
                        reason = report.reason
            finally:
                was_ready, self._link, self._active = self._link is link, None, 0
                await link.close()
            if not first.done():
                first.set_exception(EngineUnavailable(reason))
                return
            log.error("The sampler's worker ended (exit code %s); starting it again.", link.process.exitcode)
            self._fail_all(reason)
            self.restarts += 1
            failed_starts = 0 if was_ready else failed_starts + 1
        self._failure = f"The model's worker process cannot be started: {reason}"
        log.error(self._failure)

    def _connect(self, link: "Link", ready: Ready) -> None:
        self.ready, self._link = ready, link
        for version, folder in self._resident.items():
            link.send(LoadAdapter(version, folder, None))
        # What was cancelled while there was no worker never needs to start.
        waiting = [c for c in self._backlog if not isinstance(c, Add) or c.id in self._streams]
        self._backlog.clear()
        for command in waiting:
            link.send(command)

    def _receive(self, report: Report, link: "Link") -> None:
        match report:
            case Ready():
                self._connect(link, report)
            case Tokens(tokens, cached, active):
                self._active = active
                for id, found in cached.items():
                    if id in self._streams:
                        self._streams[id].cached_tokens = found
                for id, batch in tokens.items():
                    if id in self._streams:
                        self._streams[id].feed(batch)
            case AdapterLoaded(version, error):
                done = self._loading.pop(version, None)
                if done is not None and not done.done():
                    done.set_exception(EngineUnavailable(error)) if error else done.set_result(None)

    def _fail_all(self, reason: str) -> None:
        """Tell every request that the dead worker had; those it had not been sent go to the next one."""
        unsent = {command.id for command in self._backlog if isinstance(command, Add)}
        for stream in [s for s in self._streams.values() if s.id not in unsent]:
            stream.fail(EngineUnavailable(reason))
        for done in self._loading.values():
            if not done.done():
                done.set_exception(EngineUnavailable(reason))
        self._loading.clear()


class LocalStream:
    """Implements `SampleStream`. Ends after the last token of the last completion, or with an error."""

    def __init__(self, sampler: LocalSampler, id: int, version: int, n: int) -> None:
        self.id, self.version = id, version
        self.cached_tokens = 0
        self._sampler = sampler
        self._open = set(range(n))
        self._arrived: list[SampledToken] = []
        self._error: EngineUnavailable | None = None
        self._wake = asyncio.Event()

    @property
    def running(self) -> int:
        """Completions that are not finished."""
        return len(self._open)

    def feed(self, tokens: list[SampledToken]) -> None:
        for token in tokens:
            if token.index in self._open:
                self._arrived.append(token)
                if token.finish is not None:
                    self._open.discard(token.index)
        self._wake.set()

    def fail(self, error: EngineUnavailable) -> None:
        self._error = error
        self._wake.set()

    def drop(self, index: int) -> None:
        if index in self._open:
            self._open.discard(index)
            self._sampler.cancel(self.id, index)
            self._wake.set()

    def close(self) -> None:
        self._sampler.forget(self)
        self._open.clear()
        self._wake.set()

    async def __aiter__(self) -> AsyncIterator[list[SampledToken]]:
        try:
            while self._arrived or self._open:
                if not self._arrived:
                    if self._error is not None:
                        raise self._error
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                batch, self._arrived = self._arrived, []
                yield batch
        finally:
            self.close()


def run_worker(connection: Connection, options: WorkerOptions) -> None:
    """Entry of the worker process. The import is here so that the server never loads PyTorch."""
    from openclaw_rl.engines.local.worker import main

    main(connection, options)


class Link:
    """One worker process and the pipe to it."""

    def __init__(self, options: WorkerOptions) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=run_worker, args=(theirs, options), name="openclaw-rl-sampler", daemon=True
        )
        self.process.start()
        theirs.close()
        self._outbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="sampler-commands", daemon=True)
        self._sender.start()

    def send(self, command: Command) -> None:
        self._outbox.put(command)

    async def reports(self) -> AsyncIterator[Report]:
        """What the worker says, until it is gone."""
        loop, pipe = asyncio.get_running_loop(), self.connection.fileno()
        arrived: asyncio.Queue[Report | None] = asyncio.Queue()

        def readable() -> None:
            try:
                arrived.put_nowait(self.connection.recv())
            except (EOFError, OSError):
                loop.remove_reader(pipe)
                arrived.put_nowait(None)

        loop.add_reader(pipe, readable)
        try:
            while (report := await arrived.get()) is not None:
                yield report
        finally:
            loop.remove_reader(pipe)

    async def close(self) -> None:
        """Close the pipe, which tells the worker to leave, and see it gone."""
        self._outbox.put(None)
        self.connection.close()
        await asyncio.to_thread(self.process.join, EXIT_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            await asyncio.to_thread(self.process.join)

    def _send_all(self) -> None:
        while (command := self._outbox.get()) is not None:
            try:
                self.connection.send(command)
            except OSError:
                return  # the worker is gone; the reader sees that too and tells everyone
