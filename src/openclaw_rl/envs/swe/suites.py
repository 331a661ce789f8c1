"""How the tests of a repository are run: always in the sandbox, always in a new copy."""

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed
from openclaw_rl.envs.swe.packages import Files
from openclaw_rl.envs.swe.plain import PlainTests, prepare, read_reports
from openclaw_rl.envs.swe.plain_child import STARTED
from openclaw_rl.envs.swe.repository import Repository, is_protected
from openclaw_rl.envs.swe.results import TestResult
from openclaw_rl.sandbox.base import Sandbox, remove_folder
from openclaw_rl.sandbox.programs import ProgramOutcome

#: Limits of one run of plain tests.
PLAIN_SECONDS, PLAIN_MEMORY_MIB, MAX_REPORT_BYTES = 10.0, 256, 1 << 20
#: No site packages, no settings of the user, no bytecode files; the folder is not searched for modules at the start.
PLAIN_PYTHON = ("python3", "-I", "-S", "-B", "-X", "utf8", "-c")
#: How long Python may take to say that it works; a container's image may have to be loaded.
TRIAL_SECONDS = 60.0
RUNNER = Path(__file__).with_name("plain_child.py").read_text("utf-8")


def check_python(sandbox: Sandbox, argv: Sequence[str], readable: Sequence[Path] = ()) -> None:
    """Raise ConfigError if a trial of Python, which has to end well, fails in the sandbox. Blocks."""

    async def trial() -> ProgramOutcome:
        async with new_folder() as folder:
            return await sandbox.run(
                argv, folder, seconds=TRIAL_SECONDS, memory_mib=PLAIN_MEMORY_MIB, readable=readable
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


class PlainSuite:
    """Plain tests, which need Python alone."""

    def __init__(self, sandbox: Sandbox, tests: Files) -> None:
        self._sandbox, self._tests = sandbox, tests

    async def run(self, repository: Repository) -> dict[str, TestResult]:
        tests = await asyncio.to_thread(lambda: prepare(_plain_tests_in(repository)))
        return await self._run(repository, tests, judged=False)

    async def judge(self, repository: Repository) -> dict[str, TestResult]:
        return await self._run(repository, await asyncio.to_thread(prepare, self._tests), judged=True)

    async def _run(self, repository: Repository, tests: PlainTests, *, judged: bool) -> dict[str, TestResult]:
        async with new_folder() as folder:
            await to_its_end_in_thread(lambda: repository.copy_to(folder, judged=judged))
            outcome = await self._sandbox.run(
                [*PLAIN_PYTHON, RUNNER],
                folder,
                stdin=json.dumps(tests.job).encode(),
                seconds=PLAIN_SECONDS,
                memory_mib=PLAIN_MEMORY_MIB,
                max_output=MAX_REPORT_BYTES,
            )
        return await asyncio.to_thread(lambda: tests.judge(read_reports(output_of_tests(outcome, self._sandbox))))


def _plain_tests_in(repository: Repository) -> Files:
    return {path: repository.read(path) for path in repository.paths() if is_plain_test(path)}


def is_plain_test(path: str) -> bool:
    return path.rpartition("/")[2].startswith("test_") and path.endswith(".py") and is_protected(path)


async def to_its_end_in_thread(work: Callable[[], None]) -> None:
    """Do work in a thread. When cancelled, wait for its end: it must not go on in a folder that is deleted."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    finally:
        await asyncio.wait([running])


@asynccontextmanager
async def new_folder() -> AsyncIterator[Path]:
    """A folder for one run, which is deleted, whatever the run has left in it."""
    folder = Path(tempfile.mkdtemp(prefix="openclaw-swe-"))
    try:
        yield folder
    finally:
        await to_its_end_in_thread(lambda: remove_folder(folder))
