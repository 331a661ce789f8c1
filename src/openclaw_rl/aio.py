"""Helpers for asyncio."""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")
Case = TypeVar("Case")
#: How long the start of a process may take after it was cancelled.
START_SECONDS = 1.0


async def gather_or_cancel(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; when one fails, or the caller is cancelled, the others are cancelled and awaited."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def run_concurrently(cases: Sequence[Case], one: Callable[[Case], Awaitable[T]], at_once: int) -> tuple[T, ...]:
    """The result of each case, in order, `at_once` at a time. The first error cancels the rest and is raised."""
    slots = asyncio.Semaphore(at_once)

    async def in_slot(case: Case) -> T:
        async with slots:
            return await one(case)

    return tuple(await gather_or_cancel([in_slot(case) for case in cases]))


async def wait_at_most(seconds: float, something: Awaitable[object]) -> None:
    """Await something for at most so long.

    `asyncio.wait_for` of Python 3.11 may swallow a cancellation; this does not.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await something


class Stoppable(Generic[T]):
    """Work that others can stop. New work stops the one before."""

    def __init__(self) -> None:
        self._task: asyncio.Task[T] | None = None

    async def run(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Its result; None if it was stopped."""
        self.stop()
        self._task = task = asyncio.create_task(work)
        try:
            await asyncio.wait([task])
        finally:
            task.cancel()
        return None if task.cancelled() else task.result()

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()


async def in_own_thread(function: Callable[[], T], name: str) -> T:
    """Run a function that blocks in a thread of its own, which goes on if the caller stops waiting.

    It is no thread of a pool, so one that hangs delays neither other calls nor the end of the process.
    """
    ended: Future[tuple[T | None, BaseException | None]] = Future()
    ended.set_running_or_notify_cancel()

    def work() -> None:
        try:
            ended.set_result((function(), None))
        except BaseException as error:  # noqa: BLE001 - the caller gets it
            ended.set_result((None, error))

    threading.Thread(target=work, name=name, daemon=True).start()
    result, error = await asyncio.wrap_future(ended)
    # Not as the exception of the future, which cannot be a StopIteration.
    if error is not None:
        raise error
    return cast("T", result)


async def start_process(*command: str | Path, **settings: Any) -> asyncio.subprocess.Process:
    """`asyncio.create_subprocess_exec`, which can be cancelled: then the process is killed.

    asyncio's own can wait forever for the process that it has killed, if it is cancelled before its pipes are
    connected (Python 3.11).
    """
    starting = asyncio.create_task(asyncio.create_subprocess_exec(*command, **settings))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await _abandon(starting)
        raise


async def _abandon(starting: asyncio.Task[asyncio.subprocess.Process]) -> None:
    """Kill the process whose start was cancelled. Further cancellations change nothing: the caller is cancelled."""
    while not starting.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.wait({starting}, timeout=START_SECONDS)
            if not starting.done():
                # It was cancelled too, as at the end of the loop, and waits forever. A second cancellation ends that.
                starting.cancel()
    if starting.cancelled() or starting.exception() is not None:
        return
    process = starting.result()
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    # It is not waited for as long as one of its children holds a pipe.
    with contextlib.suppress(asyncio.CancelledError, TimeoutError):
        await asyncio.wait_for(process.wait(), START_SECONDS)
