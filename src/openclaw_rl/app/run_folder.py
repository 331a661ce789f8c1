"""The folders of a run: locked for one process, private to its owner, and marked with model and options."""

import contextlib
from pathlib import Path

from openclaw_rl.app.assembly import fetch_files
from openclaw_rl.app.checks import own_folders
from openclaw_rl.app.config import Config
from openclaw_rl.app.run_options import keep_options
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.lock import RunDirLock
from openclaw_rl.ledger.private import write_privately
from openclaw_rl.ledger.run_identity import keep_to_model


def lock_folders(stack: contextlib.ExitStack, config: Config) -> RunDirLock:
    """Lock the run's folders until the stack is closed; the lock of the run directory. Raises UserError."""
    lock, *_ = [
        stack.enter_context(contextlib.closing(RunDirLock(folder, option)))
        for folder, option in own_folders(config).items()
    ]
    return lock


def prepare_folders(config: Config) -> Path:
    """Fetch the model, then mark the locked folders with it and with the options; the model's folder."""
    folder = model_folder(config)
    # Only now: a model may be cached for several users.
    write_privately()
    for owned in own_folders(config) if config.capture.capture else ():
        keep_to_model(owned, config.served_name)
    keep_options(config)
    return folder


def model_folder(config: Config) -> Path:
    """The folder of the policy's model. Raises UserError."""
    try:
        return fetch_files(config)
    except OSError as error:
        raise UserError(
            f"The model cannot be stored in {config.run.cache}: {error}. "
            "Set --cache-dir to a folder that can be written to."
        ) from None
