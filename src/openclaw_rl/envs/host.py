"""Runs the code of an environment where it cannot stop the driver, and checks and bounds what it returns.

Whatever the driver cannot use is a failure of the environment.
"""

import asyncio
import contextlib
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from openclaw_rl.envs.base import EnvFailed, Environment, Episode, Message, Outcome, Step, Task, Tool
from openclaw_rl.errors import UserError
from openclaw_rl.plugins import describe

#: How long an environment may take to close an episode or itself. Nothing waits for it any longer: the work is done.
CLOSE_SECONDS = 10.0
#: How many threads an environment may block before the driver gives up.
MAX_BLOCKED_THREADS = 16
#: Longer texts of an environment are cut, with a note.
MAX_TEXT_CHARACTERS = 20_000
#: Longer hints are cut.
MAX_HINT_CHARACTERS = 4_000
#: Most messages in one step.
MAX_MESSAGES = 64
#: Largest reward, and smallest with a minus: what the server takes.
MAX_REWARD = 1e6
#: Roles that an environment speaks in. Examples of answers may stand in the first messages.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


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


def checked_messages(what: str, value: Any) -> list[Message]:
    """Messages that the server can read, with long texts cut. Raises EnvFailed."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise EnvFailed(f"{what} gave {kind(value)} instead of a list of messages")
    if len(value) > MAX_MESSAGES:
        raise EnvFailed(f"{what} gave {len(value)} messages; at most {MAX_MESSAGES} are allowed")
    messages = [checked_message(what, message) for message in value]
    check_json(f"{what} gave a message", messages)
    return messages


def checked_message(what: str, message: Any) -> Message:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in ROLES:
        raise EnvFailed(f"{what} gave {kind(message)} instead of a message with a role")
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": cut(content)}
    if isinstance(content, list):
        return {**message, "content": [cut_part(part) for part in content]}
    if content is not None:
        raise EnvFailed(f"{what} gave a message whose content is {kind(content)}")
    return dict(message)


def checked_step(value: Any) -> Step:
    """A step with messages that can be sent and a reward that is a number. Raises EnvFailed."""
    if not isinstance(value, Step):
        raise EnvFailed(f"step gave {kind(value)} instead of a Step")
    messages = checked_messages("step", value.messages)
    if not messages and not value.done:
        raise EnvFailed("step gave no message, though the episode is not done")
    if value.reward is not None:
        check_number("step", value.reward)
    return Step(messages, value.reward, checked_hint("step", value.hint), bool(value.done))


def checked_outcome(value: Any) -> Outcome:
    """An outcome whose reward is a finite number. Raises EnvFailed."""
    if not isinstance(value, Outcome):
        raise EnvFailed(f"outcome gave {kind(value)} instead of an Outcome")
    check_number("outcome", value.reward)
    return Outcome(float(value.reward), bool(value.solved), checked_hint("outcome", value.hint))


def checked_tools(value: Any) -> list[Tool]:
    """Tools in OpenAI's shape; the server checks the rest. Raises EnvFailed."""
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise EnvFailed(f"tools is {kind(value)} instead of a list of tools")
    check_json("tools has a tool", list(value))
    return list(value)


def check_json(what: str, value: Any) -> None:
    """Refuse what cannot be sent."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvFailed(f"{what} that is not JSON: {error}") from None


def check_number(what: str, value: Any) -> None:
    """Refuse a reward that the server does not take, such as NaN."""
    if not isinstance(value, int | float) or not -MAX_REWARD <= value <= MAX_REWARD:
        raise EnvFailed(
            f"{what} gave the reward {value!r:.40}, which is not a finite number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
        )


def checked_hint(what: str, hint: Any) -> str:
    if not isinstance(hint, str):
        raise EnvFailed(f"{what} gave {kind(hint)} as a hint")
    return cut(hint, MAX_HINT_CHARACTERS)


def cut_part(part: Any) -> Any:
    """One part of a message's content, with its text cut."""
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": cut(part["text"])}
    return part


def cut(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """A text that is at most about `limit` characters long: beginning and end, and how much is missing between.

    Characters that UTF-8 does not have, halves of UTF-16 pairs, become question marks.
    """
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return text
    missing = len(text) - limit
    return f"{text[: limit // 2]}\n[… {missing} characters cut …]\n{text[-(limit - limit // 2) :]}"


def kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
