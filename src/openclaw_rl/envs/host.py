"""Runs the code of an environment where it cannot stop the driver."""

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from openclaw_rl.envs.base import EnvFailed, Environment, Episode, Message, Outcome, Step, Task, Tool
from openclaw_rl.envs.checks import checked_messages, checked_outcome, checked_step, checked_tools
from openclaw_rl.errors import UserError
from openclaw_rl.plugins import describe

#: How long an environment may take to close an episode or itself. Nothing waits for it any longer: the work is done.
CLOSE_SECONDS = 10.0
#: How many threads an environment may block before the driver gives up.
MAX_BLOCKED_THREADS = 16


class EnvironmentHost:
    """Runs an environment on an event loop in a thread of its own.

    - All calls use the same loop, so episodes can share connections and locks.
    - A call that takes too long is cancelled and raises EnvFailed. So does a call that raises; the error names file
      and line.
    - Code that blocks its thread blocks only that thread: it is left behind, and later calls use a new one. Other
      calls that waited on the blocked thread fail too.
    """

    def __init__(self, environment: Environment, grace_seconds: float = 2.0) -> None:
        """`grace_seconds`: how long a cancelled call may take to end, and a thread that is alive to react."""
        self.environment = environment
        self.grace_seconds = grace_seconds
        self.blocked = 0
        self._loop = start_loop()

    async def call(self, what: str, function: Callable[[], Any], seconds: float) -> Any:
        """The result of a function of the environment, which may be async.

        Raises EnvFailed; `what` names the call in its message.
        """
        loop = self._loop
        running = asyncio.run_coroutine_threadsafe(guarded(what, function, seconds), loop)
        try:
            async with asyncio.timeout(seconds + self.grace_seconds) as limit:
                return await asyncio.wrap_future(running)
        except TimeoutError:
            if not limit.expired():
                raise
            running.cancel()
            await self._replace_if_blocked(loop)
            raise EnvFailed(f"{what} did not end within {seconds:g} seconds, and could not be cancelled") from None

    async def _replace_if_blocked(self, loop: asyncio.AbstractEventLoop) -> None:
        alive = asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loop)
        try:
            async with asyncio.timeout(self.grace_seconds):
                await asyncio.wrap_future(alive)
        except TimeoutError:
            if loop is not self._loop:
                return
            self.blocked += 1
            if self.blocked > MAX_BLOCKED_THREADS:
                raise UserError(
                    f"The environment has blocked {self.blocked} threads: it must await what takes long, or use "
                    "asyncio.to_thread."
                ) from None
            self._loop = start_loop()

    async def close(self) -> None:
        """Close the environment, if it can be closed, and end the loop. A blocked thread ends with the process."""
        close = getattr(self.environment, "close", None)
        if callable(close):
            with contextlib.suppress(EnvFailed, UserError):
                await self.call("close", close, CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)


def start_loop() -> asyncio.AbstractEventLoop:
    """An event loop that runs in a new thread."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_forever()
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    threading.Thread(target=run, name="environment", daemon=True).start()
    return loop


async def guarded(what: str, function: Callable[[], Any], seconds: float) -> Any:
    """Call a function of the environment; whatever goes wrong is an EnvFailed."""
    limit = asyncio.timeout(seconds)
    try:
        async with limit:
            result = function()
            return await result if inspect.isawaitable(result) else result
    except EnvFailed:
        raise
    except TimeoutError as error:
        if limit.expired():
            raise EnvFailed(f"{what} did not end within {seconds:g} seconds") from None
        raise EnvFailed(f"{what} failed: {describe(error)}") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise EnvFailed(f"{what} failed: CancelledError") from None
    # A program that exits must not end the thread, and with it every other episode.
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise EnvFailed(f"{what} failed: {describe(error)}") from error


class HostedEpisode:
    """One episode of a hosted environment. Every call raises EnvFailed for whatever the environment does wrong.

    - Results are checked in the environment's thread too, so an odd value cannot stop the driver.
    - An episode that was opened is closed, also if the driver is stopped while it is being opened.

    Calls that follow each other go to the thread together: a change of threads takes longer than most calls.
    """

    def __init__(self, host: EnvironmentHost, seconds: float) -> None:
        """`seconds` is how long one call of the environment may take."""
        self.host, self.seconds = host, seconds
        self._episode: Episode | None = None
        self._begun = self._closed = False

    async def start(self, task: Task, session: str = "") -> tuple[list[Tool], list[Message]]:
        """Open the episode; its tools and first messages."""

        async def begin() -> tuple[list[Tool], list[Message]]:
            def open_episode() -> Episode:
                return self.host.environment.open(replace(task, session=session))

            opened: Episode = await guarded("open", open_episode, self.seconds)
            self._episode = opened
            if self._closed:
                await self._close()
                raise EnvFailed("the episode was closed while it was being opened")
            tools = checked_tools(await guarded("tools", lambda: opened.tools, self.seconds))
            return tools, checked_messages("start", await guarded("start", opened.start, self.seconds))

        self._begun = True
        tools, messages = await self.host.call("start", begin, 3 * self.seconds)
        return tools, messages

    async def step(self, answer: Message) -> Step:
        """What the environment says to an answer."""

        async def take() -> Step:
            assert self._episode is not None
            return checked_step(await guarded("step", partial(self._episode.step, answer), self.seconds))

        step: Step = await self.host.call("step", take, self.seconds)
        return step

    async def finish(self) -> Outcome:
        """The outcome; the episode is closed."""

        async def end() -> Outcome:
            assert self._episode is not None
            outcome = checked_outcome(await guarded("outcome", self._episode.outcome, self.seconds))
            await self._close()
            return outcome

        outcome: Outcome = await self.host.call("outcome", end, self.seconds + CLOSE_SECONDS)
        return outcome

    async def close(self) -> None:
        """Close the episode, if it is open. An environment that cannot is left alone: nothing depends on it."""
        if self._begun and not self._closed:
            with contextlib.suppress(EnvFailed):
                await self.host.call("close", self._close, min(CLOSE_SECONDS, self.seconds))

    async def _close(self) -> None:
        self._closed = True
        episode, self._episode = self._episode, None
        if episode is not None:
            with contextlib.suppress(EnvFailed):
                await guarded("close", episode.close, min(CLOSE_SECONDS, self.seconds))
