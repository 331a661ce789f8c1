"""A disk that can be filled and freed while programs run: a small file system in memory, or a limit on file sizes."""

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from support.process_stats import children

SIZE_MIB = 48
BALLAST = "ballast"


class SmallDisk(Protocol):
    """A disk for a server's run directory."""

    kind: str
    folder: Path

    def fill(self, server: int) -> None:
        """Leave no room for the server with this process id."""

    def free(self, server: int) -> None: ...


class MemoryDisk:
    """A tmpfs: writing fails with ENOSPC."""

    kind = "small file system"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, _server: int) -> None:
        with contextlib.suppress(OSError), (self.folder / BALLAST).open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def free(self, _server: int) -> None:
        (self.folder / BALLAST).unlink()


class FileSizeLimit:
    """The server and its workers may not make a file longer: writing fails with EFBIG. Needs no rights."""

    kind = "file-size limit"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def fill(self, server: int) -> None:
        self._limit(server, 0)

    def free(self, server: int) -> None:
        self._limit(server, resource.RLIM_INFINITY)

    def _limit(self, server: int, size: int) -> None:
        for pid in (server, *children(server)):
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[SmallDisk]:
    """A small disk in an empty folder: a file system of its own where this process may mount one."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_MIB}m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        yield FileSizeLimit(folder)
        return
    try:
        yield MemoryDisk(folder)
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
