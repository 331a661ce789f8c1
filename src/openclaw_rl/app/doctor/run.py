"""Checks of a run: its options, model, ledger, keys and port."""

import contextlib
import stat

from openclaw_rl.app.checks import check, locked_folders
from openclaw_rl.app.config import Config
from openclaw_rl.app.doctor.finding import Finding, broken, note, ok
from openclaw_rl.app.http_server import bind
from openclaw_rl.app.hub import OnHub, ask_hub, is_downloaded
from openclaw_rl.engines.factory import ModelFiles
from openclaw_rl.ledger.lock import read_server
from openclaw_rl.ledger.schema import inspect_ledger
from openclaw_rl.models import can_be_fetched, find_model

#: A key with fewer characters can be guessed.
MIN_KEY_CHARACTERS = 16


def model(config: Config) -> Finding:
    """Whether the model is on this machine, whole."""
    name = config.policy_name
    if config.sampler.model_files is ModelFiles.TOKENIZER:
        return ok(f"{name}, which runs elsewhere ({config.sampler.name})")
    if folder := find_model(config.model.model_name, config.run.cache):
        return ok(f"{name} in {folder}")
    if is_downloaded(name, config):
        state = ask_hub(name)
        if state is OnHub.MISSING:
            return broken(f"{name} {state}", "give --model-name a folder, a GGUF file or a Hub id")
        return note(f"{name} is not on this machine yet; it {state}")
    if can_be_fetched(config.model.model_name):
        return note(f"{name} is not on this machine yet", "the first start fetches it, which needs the network")
    return broken(f"there is no model {name}", "give --model-name a folder, a GGUF file or a Hub id")


def engine(config: Config) -> Finding:
    """Whether the options fit together, the engine and the device. Raises UserError where a start would."""
    if not read_server(config.run.folder):
        check(config)
    return ok(
        f"samples with {config.sampler.name}, "
        + (f"trains with {config.learner.name}" if config.learns else "no training")
    )


def permissions(config: Config) -> Finding:
    """Whether other users can read what people said."""
    readable = [folder for folder in locked_folders(config) if folder.exists() and folder.stat().st_mode & 0o077]
    shared = [folder for folder in readable if not folder.stat().st_mode & stat.S_ISVTX]
    if shared:
        return note(f"other users may read {shared[0]}", f"the next start mends it, or: chmod 700 {shared[0]}")
    return ok("what is recorded is for you alone")


def keys(config: Config) -> Finding:
    if not config.server.api_keys:
        return ok("none, so only this machine can connect")
    names = ", ".join(key.name for key in config.server.api_keys)
    short = [key.name for key in config.server.api_keys if len(key.secret) < MIN_KEY_CHARACTERS]
    if short:
        return note(f"the key of {short[0]} is short enough to be guessed", "make one: openssl rand -hex 24")
    return ok(f"{names}; the server listens on {config.server.host}")


def port(config: Config) -> Finding:
    """Whether the server's address can be taken. Raises UserError if another program has it."""
    where = f"{config.server.host}:{config.server.proxy_port}"
    if url := read_server(config.run.folder).get("url"):
        return ok(f"the server of this run listens at {url}")
    with contextlib.closing(bind(config.server.host, config.server.proxy_port)):
        return ok(f"{where} is free")


def ledger(config: Config) -> Finding:
    """Whether the recorded turns can be read. Raises LedgerUnusable if not."""
    if not config.capture.capture:
        return ok("turns are not recorded (--no-capture)")
    turns = inspect_ledger(config.ledger_dir)
    count = "none yet" if turns is None else f"{turns} turn{'' if turns == 1 else 's'}"
    return ok(f"{count} in {config.ledger_dir}")
