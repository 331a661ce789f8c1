"""The directory of a run: one server uses it at a time, for one model, and its files are for their owner alone."""

import contextlib
import fcntl
import json
import logging
import os
import stat
import tempfile
import time
from pathlib import Path
from typing import IO, Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.errors import UserError

log = logging.getLogger(__name__)

#: Names the server that uses the directory.
SERVER_FILE = "server.json"
#: What a new ledger and the small files beside it need.
MIN_ROOM_BYTES = 1 << 20
#: In a run directory, or its ledger's: the name of the model that it belongs to.
MODEL_FILE = "model.txt"
#: The mask of a program that writes into a run directory: new files and folders are for their owner alone.
UMASK = 0o077
#: What a server and the commands about a run write into its directory. Other files there are not ours to change.
NAMES = (
    "ledger.sqlite*",
    "server.json",
    "model.txt",
    "options.*",
    "metrics.jsonl",
    "evaluations.jsonl",
    "records.*",
    "report*.html",
    "checkpoints",
    "policies",
    "recovery",
    "lines",
    "screenshots",
    "tensorboard",
    "wandb",
)


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
            self._file = (run_dir / SERVER_FILE).open("a+")
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
        with (run_dir / SERVER_FILE).open() as file:
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
    return (run_dir / SERVER_FILE).is_file()


def is_locked(file: IO[str]) -> bool:
    """Whether a server holds the file. A process id would not be enough: another process may have it by now."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


class OtherModel(UserError):
    """The folder belongs to another model; the message says to which, and what to do."""


#: What a folder belongs to whose conversations are text: any model behind an API can continue them.
TEXT_ONLY = "any model behind an API"


def keep_to_model(folder: Path, model: str) -> None:
    """Assign a folder to a model, or check that it belongs to it. Raises OtherModel.

    Only the last part of the name counts, so that a model may be moved or downloaded.
    """
    name, path = Path(model).name or Path(model).resolve().name, folder / MODEL_FILE
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name}\n")
        known = path.read_text(errors="backslashreplace").strip()
    except OSError as error:
        raise OtherModel(f"{path} cannot be used ({error.strerror}). Mend it, or give another --run-dir.") from None
    if TEXT_ONLY in (known, name) and known != name:
        raise OtherModel(
            f"{folder} holds conversations as {'text' if known == TEXT_ONLY else 'tokens'}, and "
            f"{name} {'needs tokens' if known == TEXT_ONLY else 'records text'}: give another --run-dir."
        )
    if known != name:
        raise OtherModel(
            f"{folder} holds the conversations and weights of {known}, which {name} cannot read. "
            f"Give another --run-dir, or the --model-name that it belongs to."
        )


def make_private(folder: Path) -> None:
    """Take the access of other users from a run directory and from what a run keeps there, whatever the umask was."""
    restrict(folder)
    for pattern in NAMES:
        for path in folder.glob(pattern):
            restrict(path)
            # Unlike `rglob`, this goes on where a server removes a folder meanwhile.
            for inside, folders, files in os.walk(path) if not path.is_symlink() else ():
                for name in (*folders, *files):
                    restrict(Path(inside, name))


def restrict(path: Path) -> None:
    """Leave a file or folder to its owner. One that everybody shares, as /tmp is, or that another user owns, stays."""
    try:
        mode = path.lstat().st_mode
        if not stat.S_ISLNK(mode) and not mode & stat.S_ISVTX and mode & UMASK:
            path.chmod(stat.S_IMODE(mode) & ~UMASK)
    except FileNotFoundError:
        pass  # another program has just removed it
    except OSError as error:
        log.warning("Other users may be able to read %s: its permissions cannot be changed (%s).", path, error.strerror)


def write_privately() -> None:
    """From now on, what this process and its children write is for their owner alone."""
    os.umask(UMASK)
