"""The owner's own judge: a function `score(prompt, response, next_state)`, or an object with that method.

An object may also have `hint(prompt, response, next_state)`, which gives a sentence, several, or None. Both may be
async; those that are not run in a thread of their own, so they hold nobody up, even if they never return.
"""

import asyncio
import contextlib
import inspect
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.judge.case import Case
from openclaw_rl.judge.errors import JudgeDown, JudgeFailed
from openclaw_rl.judge.judges import Opinion, Questions, checked_score
from openclaw_rl.plugins import describe, load_plugin
from openclaw_rl.types import Question, Source

log = logging.getLogger(__name__)

OPTION = "--custom-rm-path"
#: What a file may call its judge.
NAMES = ("get_reward_model", "score", "RewardModel", "Judge")
#: What the owner's code may raise: a judge that calls `sys.exit` must not end the server.
MISTAKES = (Exception, SystemExit)
#: When so many calls hang, each in its thread, it is not the turns' fault, and more threads would only cost memory.
MOST_HANGING = 8
#: Seconds until it is worth looking whether one of them has returned.
HANGING_PAUSE = 10.0
THREAD = "custom-judge"


class Threads:
    """A thread for each call of the owner's code, none of which anybody waits for at the program's end."""

    def __init__(self) -> None:
        self._calls: set[asyncio.Future[tuple[Any, BaseException | None]]] = set()

    @property
    def hanging(self) -> int:
        """Calls that were given up and have not returned."""
        return sum(call.cancelled() for call in self._calls)

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function gives or raises."""
        loop = asyncio.get_running_loop()
        call: asyncio.Future[tuple[Any, BaseException | None]] = loop.create_future()

        def settle(result: Any, error: BaseException | None) -> None:
            self._calls.discard(call)
            if not call.cancelled():
                call.set_result((result, error))

        def work() -> None:
            result, error = None, None
            try:
                result = function(*arguments)
            except MISTAKES as caught:
                error = caught
            with contextlib.suppress(RuntimeError):  # the loop may have ended meanwhile
                loop.call_soon_threadsafe(settle, result, error)

        self._calls.add(call)
        threading.Thread(target=work, daemon=True, name=THREAD).start()
        result, error = await call
        if error is not None:
            raise error
        return result


class CustomJudge:
    """Asks the owner's code. Whatever it raises is said with its file and line, and the turn is tried again."""

    source = Source.CUSTOM

    def __init__(self, path: str, settings: dict[str, Any], timeout: float) -> None:
        self.timeout = timeout
        self._threads = Threads()
        self._told = False
        found = load_plugin(path, OPTION, NAMES)
        self._score, self._hint = methods(found, path, settings)
        module = sys.modules.get(getattr(self._score, "__module__", None) or "")
        self.file = Path(getattr(module, "__file__", None) or path.partition(":")[0]).expanduser()

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        score, hints = None, None
        if Question.SCORE in wanted:
            given = await self._call(self._score, case)
            score = None if given is None else checked_score(given, self.file.name)
        if Question.HINT in wanted and self._hint is not None:
            hints = self._hints(await self._call(self._hint, case))
        return Opinion(score, hints)

    async def _call(self, function: Callable[..., Any], case: Case) -> Any:
        self._check_hanging()
        arguments = (case.request, case.response, case.outcome)
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                if inspect.iscoroutinefunction(function):
                    return await function(*arguments)
                result = await self._threads.run(function, *arguments)
                return await result if inspect.isawaitable(result) else result
        except MISTAKES as error:
            if limit.expired():
                raise JudgeFailed(f"the custom judge takes longer than --judge-timeout {self.timeout:g}") from error
            raise JudgeFailed(f"the custom judge failed: {describe(error, self.file)}") from error

    def _check_hanging(self) -> None:
        """Raise JudgeDown while too many calls hang, and say it once in the log."""
        hanging = self._threads.hanging
        reason = (
            f"{hanging} calls of {self.file.name} hang: they were given up after --judge-timeout {self.timeout:g} and "
            "have not returned; mend it and start again"
        )
        down = hanging >= MOST_HANGING
        if down and not self._told:
            log.warning("Turns wait for their judge: %s", reason)
        self._told = down
        if down:
            raise JudgeDown(reason, HANGING_PAUSE)

    def _hints(self, given: Any) -> tuple[str, ...]:
        hints = [given] if isinstance(given, str) else given or []
        if not isinstance(hints, list | tuple) or not all(isinstance(hint, str) for hint in hints):
            raise JudgeFailed(f"{self.file.name} gave {given!r} for a hint, which is no text")
        return tuple(hint.strip() for hint in hints if hint.strip())


def methods(found: Any, path: str, settings: dict[str, Any]) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
    """`score` and perhaps `hint` of a function, a class, an object, or a `get_reward_model(config)` that makes one."""
    if getattr(found, "__name__", "") == "get_reward_model":
        found = _made(found, path, settings)
    elif inspect.isclass(found):
        found = _made(found, path, *([settings] if inspect.signature(found).parameters else []))
    if hasattr(found, "score"):
        return found.score, getattr(found, "hint", None)
    if callable(found):
        return found, None
    raise ConfigError(f"{OPTION} {path} is neither a function nor an object with a method score.")


def _made(maker: Callable[..., Any], path: str, *arguments: Any) -> Any:
    try:
        return maker(*arguments)
    except Exception as error:
        file = Path(path.partition(":")[0]).expanduser()
        raise ConfigError(f"{OPTION} {path} cannot be made: {describe(error, file)}.") from error
