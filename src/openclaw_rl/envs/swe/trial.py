"""Runs the tests of our own packages in this process, to see which tests a planted bug fails.

This is for code of `packages/` with a bug of `mutate`, never for what a model wrote: there is no sandbox. A loop that a
bug makes endless is stopped after a number of lines.
"""

import builtins
import sys
from collections.abc import Callable
from types import FrameType, ModuleType
from typing import Any

from openclaw_rl.envs.swe.packages import Files
from openclaw_rl.envs.swe.plain import PlainTests
from openclaw_rl.envs.swe.plain_child import run_file
from openclaw_rl.envs.swe.results import TestResult

#: Lines of code that all tests of a package may run; they need a few thousand.
MAX_LINES = 60_000


class TooManyLines(BaseException):
    """The tests do not end."""


def try_tests(sources: Files, tests: PlainTests) -> dict[str, TestResult] | None:
    """The result of every test; None if the tests do not end."""
    modules = _Modules(sources)
    reports: list[list[Any]] = []

    def report(result: list[Any]) -> None:
        # Python ends tracing when the limit is reached, so nothing more may be run.
        if result[-1].startswith(TooManyLines.__name__):
            raise TooManyLines
        reports.append(result)

    try:
        with _LineLimit():
            for file, source, names in tests.job:
                run_file(file, source, names, {"__builtins__": modules.builtins}, report)
    except TooManyLines:
        return None
    return tests.judge(reports)


class _Modules:
    """Imports modules of a package from their texts."""

    def __init__(self, sources: Files) -> None:
        self._sources = {path.removesuffix(".py").replace("/", "."): text for path, text in sources.items()}
        self._loaded: dict[str, ModuleType] = {}
        self.builtins = {**vars(builtins), "__import__": self._import}

    def _import(self, name: str, *_: Any) -> ModuleType:
        if name not in self._loaded:
            module = self._loaded[name] = ModuleType(name)
            vars(module)["__builtins__"] = self.builtins
            exec(compile(self._sources[name], name, "exec"), vars(module))
        return self._loaded[name]


class _LineLimit:
    """Raises TooManyLines in this thread after a number of lines."""

    def __enter__(self) -> None:
        self._left = MAX_LINES
        self._before = sys.gettrace()
        sys.settrace(self._trace)

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _trace(self, _frame: FrameType, _event: str, _argument: Any) -> Callable[..., Any]:
        self._left -= 1
        if self._left < 0:
            raise TooManyLines
        return self._trace
