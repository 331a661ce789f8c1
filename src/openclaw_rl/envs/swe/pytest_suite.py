"""Tests that pytest runs, for repositories of one's own.

pytest and the tested code share a process, as in SWE-bench itself: code that is written to deceive pytest could do so.
What the policy can edit by name is put back (see `repository`); plain tests have no such gap.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.envs.swe.packages import Files
from openclaw_rl.envs.swe.plain_child import STARTED
from openclaw_rl.envs.swe.repository import Repository, write
from openclaw_rl.envs.swe.results import TestResult
from openclaw_rl.envs.swe.suites import new_folder, output_of_tests, to_its_end_in_thread
from openclaw_rl.sandbox.base import Sandbox

MEMORY_MIB, MAX_OUTPUT_BYTES = 4096, 8 << 20
#: Without the folder on the path, Python would load a sitecustomize.py of the repository at the start.
START = f"import sys; print({STARTED!r}, flush=True); " + (
    "sys.path[:0] = ['', 'src', 'lib']; import pytest; sys.exit(pytest.main(sys.argv[1:]))"
)
FLAGS = ("-q", "-rA", "--tb=line", "-p", "no:cacheprovider", "--color=no")
#: A line of pytest's summary; the reason of a failure comes after a dash.
RESULT = re.compile(r"^(PASSED|XFAIL|FAILED|ERROR|XPASS) (\S+(?:\[.*?\])?)(?: - (.*))?$", re.MULTILINE)
GOOD = frozenset({"PASSED", "XFAIL"})
#: How much of a reason is shown.
MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that has pytest and what the repository needs."""

    command: str = "python3"
    readable: Sequence[Path] = ()
    """Folders that it needs besides the system's, such as its virtual environment."""

    def argv(self, *arguments: str) -> list[str]:
        return [self.command, "-I", "-B", "-X", "utf8", *arguments]


class PytestSuite:
    """Runs the files of the tests that decide."""

    def __init__(
        self, sandbox: Sandbox, interpreter: Interpreter, tests: Files, ids: Collection[str], seconds: float
    ) -> None:
        self._sandbox, self._interpreter, self._seconds = sandbox, interpreter, seconds
        self._tests = tests
        """The texts of test files at the end."""
        self._files = sorted({id_.partition("::")[0] for id_ in ids})

    async def run(self, repository: Repository) -> dict[str, TestResult]:
        async with new_folder() as folder:
            await to_its_end_in_thread(lambda: repository.copy_to(folder, judged=False))
            return await self._run(folder)

    async def judge(self, repository: Repository) -> dict[str, TestResult]:
        async with new_folder() as folder:
            await to_its_end_in_thread(lambda: self._copy_with_tests(repository, folder))
            return await self._run(folder)

    def _copy_with_tests(self, repository: Repository, folder: Path) -> None:
        repository.copy_to(folder, judged=True)
        for path, text in self._tests.items():
            write(folder, path, text)

    async def _run(self, folder: Path) -> dict[str, TestResult]:
        files = [file for file in self._files if (folder / file).exists()]
        outcome = await self._sandbox.run(
            self._interpreter.argv("-c", START, *FLAGS, *files),
            folder,
            seconds=self._seconds,
            memory_mib=MEMORY_MIB,
            max_output=MAX_OUTPUT_BYTES,
            readable=self._interpreter.readable,
        )
        output = output_of_tests(outcome, self._sandbox)
        results = read_results(output)
        if not results:
            said = (output + outcome.stderr).strip()[-MAX_REASON:]
            return {"pytest": TestResult(False, f"pytest ran no test ({outcome.ended}): {said}", loaded=False)}
        return results


def read_results(output: str) -> dict[str, TestResult]:
    """The results in pytest's summary, the last part of its output."""
    results: dict[str, TestResult] = {}
    for status, id_, reason in RESULT.findall(output):
        passed = status in GOOD and (id_ not in results or results[id_].passed)
        problem = "" if passed else f"{id_} fails: {(reason or status)[:MAX_REASON]}"
        results[id_] = TestResult(passed, problem, loaded="::" in id_)
    return results
