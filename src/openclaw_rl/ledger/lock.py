"""One server a run directory, and one a ledger's."""

import contextlib
import fcntl
import json
import os
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.errors import UserError

FILE = "server.json"


class RunDirInUse(UserError):
    """Another server already uses the directory; the message names its process."""


class RunDirLock:
    """Held from creation until the process ends, however it ends. The file tells others who and where.

    `option` is the one that names the directory. Raises RunDirInUse, and ConfigError for one that cannot be used.
    """

    def __init__(self, run_dir: Path, option: str = "--run-dir") -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self._file = (run_dir / FILE).open("a+")
        except OSError as error:
            raise unusable(run_dir, option, error) from None
        if not self._lock():
            pid = read_server(run_dir).get("pid", "unknown")
            self._file.close()
            raise RunDirInUse(
                f"{run_dir} is in use by the server with process id {pid}. Stop that one, or give this one "
                f"another {option}."
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


def check_usable(folder: Path, option: str) -> None:
    """Whether files can be made in a folder, which need not be there yet. Leaves nothing behind. Raises ConfigError."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        # Tried, because permissions do not tell: not of a disk that is read-only, and nothing to an administrator.
        with tempfile.TemporaryDirectory(dir=nearest):
            pass
    except OSError as error:
        raise unusable(folder, option, error) from None


def unusable(folder: Path, option: str, error: OSError) -> ConfigError:
    return ConfigError(f"{folder} cannot be used: {error.strerror}. Give {option} a folder that can be written to.")


def read_server(run_dir: Path) -> dict[str, Any]:
    """What the server of a run directory told; empty if none did or it is gone. Raises ConfigError for a file."""
    if run_dir.is_file():
        raise ConfigError(f"{run_dir} is a file. Give --run-dir the run directory of a server.")
    try:
        with (run_dir / FILE).open() as file:
            if not is_locked(file):
                return {}
            told = json.load(file)
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def server_url(run_dir: Path) -> str | None:
    """Where the server of a run directory answers, if one runs there. Raises ConfigError if it is a file."""
    return read_server(run_dir).get("url")


def was_served(run_dir: Path) -> bool:
    """Whether a server has ever used this run directory."""
    return (run_dir / FILE).is_file()


def is_locked(file: IO[str]) -> bool:
    """Whether a server holds the file: surer than a process id, which another process may have by now."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
