"""How the tests of a repository are run: always in the sandbox, always in a new copy."""

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.swe.packages import Files
from openclaw_rl.envs.swe.plain import PlainResult, PlainTests, prepare, read_reports
from openclaw_rl.envs.swe.repository import Repository, is_protected
from openclaw_rl.sandbox.base import Sandbox, remove_folder

#: Limits of one run of plain tests.
PLAIN_SECONDS, PLAIN_MEMORY_MIB, MAX_REPORT_BYTES = 10.0, 256, 1 << 20
#: No site packages, no settings of the user, no bytecode files; the folder is not searched for modules at the start.
PLAIN_PYTHON = ("python3", "-I", "-S", "-B", "-X", "utf8", "-c")
#: How long Python may take to say that it works; a container's image may have to be loaded.
TRIAL_SECONDS = 60.0
RUNNER = Path(__file__).with_name("plain_child.py").read_text("utf-8")


def check_python(sandbox: Sandbox, argv: Sequence[str], readable: Sequence[Path] = ()) -> None:
    """Raise ConfigError if a trial of Python, which has to end well, fails in the sandbox. Blocks."""
    with new_folder() as folder, ThreadPoolExecutor(1) as thread:
        trial = sandbox.run(argv, folder, seconds=TRIAL_SECONDS, memory_mib=PLAIN_MEMORY_MIB, readable=readable)
        outcome = thread.submit(asyncio.run, trial).result()
    if outcome.exit_code:
        reason = " ".join(outcome.stderr.split())[-200:] or f"it ended with status {outcome.exit_code}"
        raise ConfigError(f"{argv[0]} cannot run tests in the sandbox {sandbox.name}: {reason}.")


class TestSuite(Protocol):
    """The tests of one task."""

    async def run(self, repository: Repository) -> dict[str, PlainResult]:
        """Run the tests as they are in the repository now."""

    async def judge(self, repository: Repository) -> dict[str, PlainResult]:
        """Run the original tests, also hidden ones, on a clean copy with the edits of sources."""


class PlainSuite:
    """Plain tests, which need Python alone."""

    def __init__(self, sandbox: Sandbox, tests: Files) -> None:
        self._sandbox, self._tests = sandbox, tests

    async def run(self, repository: Repository) -> dict[str, PlainResult]:
        files = {path: repository.read(path) for path in repository.paths() if is_plain_test(path)}
        return await self._run(repository, prepare(files), judged=False)

    async def judge(self, repository: Repository) -> dict[str, PlainResult]:
        return await self._run(repository, prepare(self._tests), judged=True)

    async def _run(self, repository: Repository, tests: PlainTests, *, judged: bool) -> dict[str, PlainResult]:
        with new_folder() as folder:
            await asyncio.to_thread(repository.copy_to, folder, judged=judged)
            outcome = await self._sandbox.run(
                [*PLAIN_PYTHON, RUNNER],
                folder,
                stdin=json.dumps(tests.job).encode(),
                seconds=PLAIN_SECONDS,
                memory_mib=PLAIN_MEMORY_MIB,
                max_output=MAX_REPORT_BYTES,
            )
        return tests.judge(read_reports(outcome.stdout))


def is_plain_test(path: str) -> bool:
    return path.rpartition("/")[2].startswith("test_") and path.endswith(".py") and is_protected(path)


@contextmanager
def new_folder() -> Iterator[Path]:
    """A folder for one run, which is deleted, whatever the run has left in it."""
    folder = Path(tempfile.mkdtemp(prefix="openclaw-swe-"))
    try:
        yield folder
    finally:
        remove_folder(folder)
