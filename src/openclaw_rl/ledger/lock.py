"""One server a run directory."""

import fcntl
import json
import os
from pathlib import Path
from typing import Any

FILE = "server.json"


class RunDirInUse(Exception):
    """Another server already uses the run directory; the message names its process."""


class RunDirLock:
    """Held from creation until the process ends, however it ends. The file tells others who and where."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._path = run_dir / FILE
        self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = read_server(run_dir).get("pid", "unknown")
            self._file.close()
            raise RunDirInUse(
                f"{run_dir} is in use by the server with process id {pid}. Stop that one, or give this one "
                "another --run-dir."
            ) from None
        self.tell(url=None)

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
        told: dict[str, Any] = json.loads((run_dir / FILE).read_text())
    except (OSError, ValueError):
        return {}
    return told if is_alive(told["pid"]) else {}


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
