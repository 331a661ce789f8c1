"""One server a run directory."""

import contextlib
import fcntl
import json
import os
import time
from pathlib import Path
from typing import IO, Any

FILE = "server.json"


class RunDirInUse(Exception):
    """Another server already uses the run directory; the message names its process."""


class RunDirLock:
    """Held from creation until the process ends, however it ends. The file tells others who and where."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / FILE
        self._file = self._path.open("a+")
        if not self._lock():
            pid = read_server(run_dir).get("pid", "unknown")
            self._file.close()
            raise RunDirInUse(
                f"{run_dir} is in use by the server with process id {pid}. Stop that one, or give this one "
                "another --run-dir."
            )
        self.tell(url=None)

    def _lock(self) -> bool:
        """Tried for a moment: somebody may just be looking whether a server is there."""
        for _ in range(10):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.01)
        return False

    def tell(self, url: str | None) -> None:
        """Write down where this server can be reached."""
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "url": url}))
        self._file.flush()

    def close(self) -> None:
        self._file.truncate(0)
        self._file.close()


def read_server(run_dir: Path) -> dict[str, Any]:
    """What the server of a run directory told; empty if none did or it is gone."""
    try:
        with (run_dir / FILE).open() as file:
            if not is_locked(file):
                return {}
            told = json.load(file)
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def is_locked(file: IO[str]) -> bool:
    """Whether a server holds the file: surer than a process id, which another process may have by now."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
