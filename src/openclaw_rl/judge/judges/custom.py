"""The user's own judge: a function `score(prompt, response, next_state)`, or an object with that method.

An object may also have `hint(prompt, response, next_state)`, which returns a sentence, several, or None. Both may be
async. Each call of one that is not async runs in a thread of its own, so a call that never returns blocks nothing else.
"""

import asyncio
import inspect
import reprlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openclaw_rl.aio import in_own_thread
from openclaw_rl.config.options import ConfigError
from openclaw_rl.judge.judges.base import BreakableJudge, Case, JudgeDown, JudgeFailed, Opinion, Questions, UserWords
from openclaw_rl.judge.judges.wish_answers import read_object
from openclaw_rl.judge.rules.wishes import MOST_WISHES
from openclaw_rl.plugins import describe, load_plugin
from openclaw_rl.types import HeardWishes, Question, Source

JudgeMethods = tuple[Callable[..., Any], Callable[..., Any] | None, Callable[..., Any] | None]
OPTION = "--custom-rm-path"
#: The names that a judge may have in its file.
NAMES = ("get_reward_model", "score", "RewardModel", "Judge")
#: What the user's code may raise. A judge that calls `sys.exit` must not end the server.
CODE_ERRORS = (Exception, SystemExit)
#: At most this many calls may hang, because each keeps a thread.
MAX_HANGING_CALLS = 8
#: Seconds until a judge with too many hanging calls is tried again.
HANGING_PAUSE = 10.0
THREAD_NAME = "custom-judge"


class CallThreads:
    """Runs each call of the user's code in a thread of its own. The process does not wait for them when it ends."""

    def __init__(self) -> None:
        self._under_way: set[object] = set()
        self._awaited = 0

    @property
    def hanging(self) -> int:
        """How many calls were given up and have not returned."""
        return len(self._under_way) - self._awaited

    async def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return or raise what the function does."""
        call = object()

        def work() -> Any:
            try:
                return function(*arguments)
            finally:
                self._under_way.discard(call)

        self._under_way.add(call)
        self._awaited += 1
        try:
            return await in_own_thread(work, THREAD_NAME)
        finally:
            self._awaited -= 1


class CustomJudge(BreakableJudge):
    """Asks the user's code.

    - An exception in it fails the turn's trial. The message names the file and the line.
    - A call that takes longer than the timeout is given up. After several in a row the judge is down and turns wait.
    - At most MAX_HANGING_CALLS threads hang at a time.
    """

    source = Source.CUSTOM

    def __init__(self, path: str, settings: dict[str, Any], timeout: float) -> None:
        super().__init__()
        self.timeout = timeout
        self._threads = CallThreads()
        self._score, self._hint, self._wishes = judge_methods(load_plugin(path, OPTION, NAMES), path, settings)
        module = sys.modules.get(getattr(self._score, "__module__", None) or "")
        self.file = Path(getattr(module, "__file__", None) or path.partition(":")[0]).expanduser()

    @property
    def reads_wishes(self) -> bool:
        return self._wishes is not None

    async def judge(self, case: Case, wanted: Questions) -> Opinion:
        return await self.breaker.call(lambda: self._judge(case, wanted))

    async def _judge(self, case: Case, wanted: Questions) -> Opinion:
        score, hints, wishes = None, None, None
        if Question.SCORE in wanted:
            value = await self._call(self._score, case)
            score = None if value is None else self._checked_score(value)
        if Question.HINT in wanted and self._hint is not None:
            hints = self._checked_hints(await self._call(self._hint, case))
        if Question.WISHES in wanted and self._wishes is not None and case.user is not None:
            wishes = self._checked_wishes(await self._call(self._wishes, case), case.user)
        return Opinion(score, hints, wishes=wishes)

    async def _call(self, function: Callable[..., Any], case: Case) -> Any:
        if self._threads.hanging >= MAX_HANGING_CALLS:
            raise JudgeDown(
                f"{self._threads.hanging} calls of {self.file.name} took longer than --judge-timeout {self.timeout:g} "
                "and still hang; correct it and restart the server",
                HANGING_PAUSE,
            )
        arguments = (case.request, case.response, case.outcome)
        limit = asyncio.timeout(self.timeout)
        try:
            async with limit:
                if inspect.iscoroutinefunction(function):
                    return await function(*arguments)
                result = await self._threads.run(function, *arguments)
                return await result if inspect.isawaitable(result) else result
        except CODE_ERRORS as error:
            if limit.expired():
                raise TimeoutError(f"{self.file.name} takes longer than --judge-timeout {self.timeout:g}") from error
            raise JudgeFailed(f"the custom judge failed: {describe(error, self.file)}") from error

    def _checked_score(self, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not -1 <= value <= 1:
            raise JudgeFailed(f"{self.file.name} returned {reprlib.repr(value)}, which is not a number from -1 to 1")
        return float(value)

    def _checked_hints(self, value: Any) -> tuple[str, ...]:
        hints = [value] if isinstance(value, str) else value or []
        if not isinstance(hints, list | tuple) or not all(isinstance(hint, str) for hint in hints):
            raise JudgeFailed(f"{self.file.name} returned {reprlib.repr(value)} for a hint, which is not text")
        return tuple(hint.strip() for hint in hints if hint.strip())

    def _checked_wishes(self, value: Any, user: UserWords) -> HeardWishes | None:
        if value is None:
            return None
        found = value if isinstance(value, dict) else {"wishes": [value] if isinstance(value, str) else value}
        read = read_object(found, user) if isinstance(found.get("wishes"), list) else None
        if read is None:
            raise JudgeFailed(
                f"{self.file.name} returned {reprlib.repr(value)} for wishes, which is not a list of at most "
                f"{MOST_WISHES} instructions"
            )
        return read


def judge_methods(plugin: Any, path: str, settings: dict[str, Any]) -> JudgeMethods:
    """`score`, and `hint` and `wishes` if there are any, of a function, class, object or `get_reward_model(config)`."""
    if getattr(plugin, "__name__", "") == "get_reward_model":
        plugin = _create(plugin, path, settings)
    elif inspect.isclass(plugin):
        plugin = _create(plugin, path, *([settings] if inspect.signature(plugin).parameters else []))
    if hasattr(plugin, "score"):
        return plugin.score, getattr(plugin, "hint", None), getattr(plugin, "wishes", None)
    if callable(plugin):
        return plugin, None, None
    raise ConfigError(f"{OPTION} {path} is neither a function nor an object with a method score.")


def _create(factory: Callable[..., Any], path: str, *arguments: Any) -> Any:
    try:
        return factory(*arguments)
    except Exception as error:
        file = Path(path.partition(":")[0]).expanduser()
        raise ConfigError(f"{OPTION} {path} cannot be created: {describe(error, file)}.") from error
