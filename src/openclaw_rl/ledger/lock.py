"""The lock of a run directory or a ledger's directory: one server uses it at a time."""

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
from openclaw_rl.ledger.private import make_private

FILE = "server.json"
#: What a new ledger and the small files beside it need.
MIN_ROOM_BYTES = 1 << 20


class RunDirInUse(UserError):
    """Another server already uses the directory; the message names its process."""


class RunDirLock:
    """Held from creation until the process ends, however it ends. The file names the process and its address.

    The directory, and what a run keeps in it, is made private to its owner.

    `option` is the option that names the directory. Raises RunDirInUse, and ConfigError if it cannot be used.
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
        make_private(run_dir)
        self.tell(url=None)

    def _lock(self) -> bool:
        """Retries for a moment: a command that looks for a server holds the lock briefly."""
        for _ in range(10):
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            time.sleep(0.01)
        return False

    def tell(self, url: str | None) -> None:
        """Write the address of this server into the file."""
        self._file.truncate(0)
        self._file.write(json.dumps({"pid": os.getpid(), "url": url}))
        self._file.flush()

    def close(self) -> None:
        self._file.truncate(0)
        self._file.close()


def check_usable(folder: Path, option: str) -> None:
    """Raise ConfigError unless a folder, which need not exist yet, has room for new files. Leaves nothing behind."""
    try:
        nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        # Trying is surer than permissions: a disk may be full, and an administrator has every permission.
        with tempfile.TemporaryDirectory(dir=nearest) as trial:
            Path(trial, "room").write_bytes(bytes(MIN_ROOM_BYTES))
    except OSError as error:
        raise unusable(folder, option, error) from None


def unusable(folder: Path, option: str, error: OSError) -> ConfigError:
    return ConfigError(f"{folder} cannot be used: {error.strerror}. Give {option} a folder that can be written to.")


def read_server(run_dir: Path) -> dict[str, Any]:
    """Process id and URL of the server that uses a run directory; empty if none does. Raises ConfigError for a file."""
    if run_dir.is_file():
        raise ConfigError(f"{run_dir} is a file. Give --run-dir the run directory of a server.")
    try:
        with (run_dir / FILE).open() as file:
            if not is_locked(file):
                return {}
            server = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return server if isinstance(server, dict) else {}


def server_url(run_dir: Path) -> str | None:
    """Where the server of a run directory answers, if one runs there. Raises ConfigError if it is a file."""
    return read_server(run_dir).get("url")


def was_served(run_dir: Path) -> bool:
    """Whether a server has ever used this run directory."""
    return (run_dir / FILE).is_file()


def is_locked(file: IO[str]) -> bool:
    """Whether a server holds the file. A process id would not be enough: another process may have it by now."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False
