"""Keeps a run's files from other users of the machine: they hold what people said and what was learned from it."""

import logging
import os
import stat
from pathlib import Path

log = logging.getLogger(__name__)

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
    "screenshots",
    "tensorboard",
    "wandb",
)


def make_private(folder: Path) -> None:
    """Take the access of other users from a run directory and from what a run keeps there, whatever the umask was."""
    restrict(folder)
    for pattern in NAMES:
        for path in folder.glob(pattern):
            restrict(path)
            for inner in path.rglob("*") if path.is_dir() and not path.is_symlink() else ():
                restrict(inner)


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
