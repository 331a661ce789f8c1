"""How the tests of a repository are run: always in the sandbox, always in a new copy.

pytest and the tested code share a process, as in SWE-bench itself: code that is written to deceive pytest could do so.
What the policy can edit by name is put back (see `repository`); `assert_tests` have no such gap.
"""

import asyncio
import re
import tempfile
from collections.abc import AsyncIterator, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed
from openclaw_rl.envs.swe.assert_tests_child import STARTED
from openclaw_rl.envs.swe.packages import Files
from openclaw_rl.envs.swe.repository import Repository, write
from openclaw_rl.sandbox.base import Sandbox, remove_folder
from openclaw_rl.sandbox.programs import ProgramOutcome, even_if_cancelled

#: How long Python may take to say that it works; a container's image may have to be loaded.
TRIAL_SECONDS = 60.0
#: What a trial of Python, and what a run of pytest may take.
TRIAL_MEMORY_MIB = 256
PYTEST_MEMORY_MIB = 4096
MAX_OUTPUT_BYTES = 8 << 20
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
class TestResult:
    """What became of a test."""

    passed: bool
    problem: str = ""
    """What is wrong, in a sentence; empty if it passed."""
    loaded: bool = True
    """Whether its file could be loaded, and with it the code that it tests."""


def check_python(sandbox: Sandbox, argv: Sequence[str], readable: Sequence[Path] = ()) -> None:
    """Raise ConfigError if a trial of Python, which has to end well, fails in the sandbox. Blocks."""

    async def trial() -> ProgramOutcome:
        async with new_folder() as folder:
            return await sandbox.run(
                argv, folder, seconds=TRIAL_SECONDS, memory_mib=TRIAL_MEMORY_MIB, readable=readable
            )

    with ThreadPoolExecutor(1) as thread:
        outcome = thread.submit(asyncio.run, trial()).result()
    if outcome.exit_code:
        raise ConfigError(f"{argv[0]} cannot run tests in the sandbox {sandbox.name}: {_why_it_ended(outcome)}.")


def output_of_tests(outcome: ProgramOutcome, sandbox: Sandbox) -> str:
    """What a runner of tests wrote after the line by which it says that it has started.

    Raises EnvFailed without that line: no tested code has been loaded then, so the policy is not to blame.
    """
    first_line, _, output = outcome.stdout.partition("\n")
    if first_line != STARTED:
        raise EnvFailed(f"tests could not be started in the sandbox {sandbox.name}: {_why_it_ended(outcome)}")
    return output


def _why_it_ended(outcome: ProgramOutcome) -> str:
    return " ".join(outcome.stderr.split())[-200:] or f"it {outcome.ended} with status {outcome.exit_code}"


class TestSuite(Protocol):
    """The tests of one task.

    - Whatever the policy wrote, there is a result.
    - Both methods raise EnvFailed if the tests cannot be started.
    """

    async def run(self, repository: Repository) -> dict[str, TestResult]:
        """Run the tests as they are in the repository now."""

    async def judge(self, repository: Repository) -> dict[str, TestResult]:
        """Run the original tests, also hidden ones, on a clean copy with the edits of sources."""


@asynccontextmanager
async def new_folder() -> AsyncIterator[Path]:
    """A folder for one run, which is deleted, whatever the run has left in it."""
    folder = Path(tempfile.mkdtemp(prefix="openclaw-swe-"))
    try:
        yield folder
    finally:
        await even_if_cancelled(asyncio.to_thread(remove_folder, folder))


@asynccontextmanager
async def copy_of(repository: Repository, *, judged: bool, tests: Files | None = None) -> AsyncIterator[Path]:
    """A folder for one run with a clean copy of a repository, in which these tests are put."""
    async with new_folder() as folder:

        def copy() -> None:
            repository.copy_to(folder, judged=judged)
            for path, text in (tests or {}).items():
                write(folder, path, text)

        # To its end: it must not go on in a folder that is deleted.
        await even_if_cancelled(asyncio.to_thread(copy))
        yield folder


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that has pytest and what the repository needs."""

    command: str = "python3"
    readable: Sequence[Path] = ()
    """Folders that it needs besides the system's, such as its virtual environment."""

    def argv(self, *arguments: str) -> list[str]:
        return [self.command, "-I", "-B", "-X", "utf8", *arguments]


class PytestSuite:
    """Tests that pytest runs: the files of the tests that decide."""

    def __init__(
        self, sandbox: Sandbox, interpreter: Interpreter, tests: Files, ids: Collection[str], seconds: float
    ) -> None:
        self._sandbox = sandbox
        self._interpreter = interpreter
        self._seconds = seconds
        self._tests = tests
        """The texts of test files at the end."""
        self._files = sorted({id_.partition("::")[0] for id_ in ids})

    async def run(self, repository: Repository) -> dict[str, TestResult]:
        async with copy_of(repository, judged=False) as folder:
            return await self._run(folder)

    async def judge(self, repository: Repository) -> dict[str, TestResult]:
        async with copy_of(repository, judged=True, tests=self._tests) as folder:
            return await self._run(folder)

    async def _run(self, folder: Path) -> dict[str, TestResult]:
        files = [file for file in self._files if (folder / file).exists()]
        outcome = await self._sandbox.run(
            self._interpreter.argv("-c", START, *FLAGS, *files),
            folder,
            seconds=self._seconds,
            memory_mib=PYTEST_MEMORY_MIB,
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
