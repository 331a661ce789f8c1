"""Runs what `benchmark`, `wishes`, `demo` and `eval` measure: items, so many at a time.

- What items share, such as a server, is started with the first of them and stopped after the last one.
- An item has a line in the file of results as soon as it is done. A run with the same file goes on with what is left.
- The first item that fails stops the others. However a run ends, what is done is shown.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from openclaw_rl.aio import run_concurrently
from openclaw_rl.evals.result_log import ResultLog
from openclaw_rl.lab.commands import RunProgress, run_stoppable
from openclaw_rl.terminal import plural

Shared = TypeVar("Shared")


@dataclass(frozen=True, slots=True)
class RunItem(Generic[Shared]):
    """Something that is measured alone."""

    key: tuple[str, ...]
    """What the file of results knows it by."""
    measure: Callable[[Shared], Awaitable[tuple[Mapping[str, Any], str]]]
    """Measures it with what its group shares; its line, and the same in words, which are printed if there are any."""
    counts: bool = False
    """Whether it is of several cases, which it counts itself."""


class ItemGroup(Generic[Shared]):
    """Items with one file of results, and with what they share."""

    def __init__(
        self,
        items: Sequence[RunItem[Shared]],
        shared: Callable[[], AbstractAsyncContextManager[Shared]],
        log: ResultLog | None = None,
        *,
        one_per_server: bool = False,
    ) -> None:
        """With `one_per_server`, each item at the same time needs a server: items of other groups come first then."""
        self.left = [item for item in items if log is None or item.key not in log.done]
        self._shared, self._log, self._one_per_server = shared, log, one_per_server
        self._unfinished = len(self.left)
        self.under_way = 0
        """Items that need a server each now."""
        self._stack = contextlib.AsyncExitStack()
        self._starting: asyncio.Task[Shared] | None = None

    async def measure_next(self, progress: RunProgress) -> None:
        """Measure an item, and write down what it has shown. Raises what the item raises."""
        item = self.left.pop(0)
        self.under_way += self._one_per_server
        if self._starting is None:
            self._starting = asyncio.create_task(self._start(progress))
        shared = await asyncio.shield(self._starting)
        progress.measuring += 1
        line, words = await item.measure(shared)
        progress.measuring -= 1
        if self._log is not None:
            self._log.add(line)
        if not item.counts:
            progress.advance()
        if words:
            progress.say(words)
        self._unfinished -= 1
        self.under_way -= self._one_per_server
        if not self._unfinished:
            await self.close()

    async def _start(self, progress: RunProgress) -> Shared:
        shared = await self._stack.enter_async_context(self._shared())
        progress.begin()
        return shared

    async def close(self) -> None:
        """Stop what was started."""
        if self._starting and not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._stack.aclose()


def run_items(
    groups: Sequence[ItemGroup[Any]],
    at_once: int,
    progress: RunProgress,
    show: Callable[[], None],
    around: AbstractAsyncContextManager[object] | None = None,
) -> None:
    """Measure what is not done yet, `at_once` items at a time, and show what is done, however it ends.

    `around` is open meanwhile. Ctrl-C stops all without an error. Raises what the first item raises that fails.
    """

    async def work(_: int) -> None:
        # Taken from what is left, so that no item begins after another has failed.
        while left := [group for group in groups if group.left]:
            await min(left, key=lambda one: one.under_way).measure_next(progress)

    async def measure_all() -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(progress)
            await stack.enter_async_context(around or contextlib.nullcontext())
            for group in groups:
                stack.push_async_callback(group.close)
            await run_concurrently(range(at_once), work, at_once)

    try:
        if any(group.left for group in groups):
            run_stoppable(measure_all(), progress.console)
    finally:
        # Also after an error or Ctrl-C: what is done may have taken hours.
        show()


def left_in_words(items: int, one: str, many: str, out: Path) -> str:
    """How many items are to be measured, and how a run goes on that is stopped."""
    goes_on = f"to measure. If it is stopped, the same command with --out {out} goes on."
    return f"{plural(items, one, many)} {goes_on}" if items else "all is measured already."
