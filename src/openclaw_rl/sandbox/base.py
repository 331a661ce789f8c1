"""What a sandbox is: it runs programs that a model chose."""

import abc
import asyncio
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from openclaw_rl.sandbox.fences.kernel import NOBODY
from openclaw_rl.sandbox.programs import MAX_OUTPUT, ProgramOutcome, even_if_cancelled, start_program, to_its_end


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one program or shell may use."""

    folder: Path
    """The working folder, the only one that it may change and keep."""
    scratch: Path
    """A folder for temporary files."""
    cpu_seconds: float
    memory_mib: int = 512
    """Memory of each process; in a container, of all of them."""
    readable: tuple[Path, ...] = ()
    """Files and folders, besides the system's, that it may read and run."""
    network: bool = False
    name: str = ""
    """A name that nothing else has."""


class Sandbox(abc.ABC):
    """Runs programs and shells, each with an allowance.

    - Started by root, everything inside runs as another user, which is in place before the program is started.
    - Limits on CPU time, wall time, memory, output and size of a file always hold.
    - `about` says in one sentence what else holds.
    """

    name: str
    about: str
    changes_modes = True
    """Whether programs inside may change the modes of files."""
    held_by_child = False
    """Whether all processes end with the child of the started process, which waits for that."""

    @abc.abstractmethod
    def command_line(self, argv: Sequence[str], allowance: Allowance) -> list[str]:
        """The command line that runs a program inside. This process has to start it."""

    def end(self, allowance: Allowance) -> None:  # noqa: B027 - most sandboxes end with their process
        """End what the end of the process does not end. Blocks."""

    async def run(
        self,
        argv: Sequence[str],
        folder: Path,
        *,
        stdin: bytes = b"",
        seconds: float = 10.0,
        memory_mib: int = 512,
        max_output: int = MAX_OUTPUT,
        readable: Sequence[Path] = (),
        network: bool = False,
    ) -> ProgramOutcome:
        """Run a program to its end or its limits.

        Its processes are gone when this returns or is cancelled; without a sandbox, those of its process group.
        """
        give_folder(folder)
        scratch = new_scratch_folder()
        allowance = Allowance(folder, scratch, seconds, memory_mib, tuple(readable), network, new_name())
        try:
            started = start_program(self.command_line(argv, allowance), stdin, folder)
            return await to_its_end(started, seconds, max_output, held_by_child=self.held_by_child)
        finally:
            await even_if_cancelled(asyncio.to_thread(self._clean_up, allowance))

    def _clean_up(self, allowance: Allowance) -> None:
        self.end(allowance)
        remove_folder(allowance.scratch)


def new_name() -> str:
    return f"openclaw-{uuid4().hex[:16]}"


def give_folder(folder: Path, *, whole: bool = False) -> None:
    """Let programs inside a sandbox write in a folder: started by root, they run as nobody.

    With `whole`, also everything in it: only for files that no program inside has changed yet.
    """
    if os.getuid() != 0:
        return
    os.chown(folder, NOBODY, NOBODY)
    for path in folder.rglob("*") if whole else ():
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)


def new_scratch_folder() -> Path:
    """A folder for temporary files of one program or shell. The caller deletes it with `remove_folder`."""
    folder = Path(tempfile.mkdtemp(prefix="openclaw-scratch-"))
    give_folder(folder)
    return folder


def remove_folder(folder: Path) -> None:
    """Delete a folder that programs in a sandbox have filled: however deep it is, whatever modes it has. Blocks."""
    # A program deletes folders that are too deep for Python's functions.
    if not _remove(folder):
        subprocess.run(["chmod", "-R", "u+rwx", str(folder)], capture_output=True, check=False)
        _remove(folder)


def _remove(folder: Path) -> bool:
    if shutil.which("rm") is None:
        shutil.rmtree(folder, ignore_errors=True)
    else:
        subprocess.run(["rm", "-rf", "--", str(folder)], capture_output=True, check=False)
    return not folder.exists()
