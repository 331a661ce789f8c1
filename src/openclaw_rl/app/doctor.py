"""Looks for what keeps a server from working on this machine, and says how to mend it. Nothing is changed."""

import asyncio
import contextlib
import importlib.metadata
import platform
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from packaging.requirements import Requirement

from openclaw_rl import __version__
from openclaw_rl.app.checks import check, locked_folders
from openclaw_rl.app.config import Config
from openclaw_rl.app.http_server import bind
from openclaw_rl.app.hub import OnHub, ask_hub, is_downloaded
from openclaw_rl.app.larger_model import in_words, larger_model
from openclaw_rl.app.split import size_of
from openclaw_rl.client import GIVE_KEY, Client, ServerError, ready_state
from openclaw_rl.config.options import ConfigError
from openclaw_rl.connect.clients import CLIENTS, NO_SERVER, ServerFacts
from openclaw_rl.connect.files import addition, is_connected
from openclaw_rl.engines.factory import ModelFiles
from openclaw_rl.engines.host import SHARES_MEMORY, usable_memory
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.memory import BITS
from openclaw_rl.engines.upstream.options import UpstreamOptions
from openclaw_rl.engines.upstream.sampler import Upstream
from openclaw_rl.errors import UserError
from openclaw_rl.http_client import text_without_accounts
from openclaw_rl.ledger.run_dir import check_usable, read_server, server_url
from openclaw_rl.ledger.schema import inspect_ledger
from openclaw_rl.models import can_be_fetched, find_model
from openclaw_rl.sandbox.kinds import choose_sandbox


class Health(StrEnum):
    """How a part is doing."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; a server works nevertheless."""
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """What a check has found, and how to mend it if it is not well."""

    health: Health
    text: str
    mend: str = ""


def ok(text: str) -> Finding:
    return Finding(Health.OK, text)


def note(text: str, mend: str = "") -> Finding:
    return Finding(Health.NOTE, text, mend)


def broken(text: str, mend: str) -> Finding:
    return Finding(Health.BROKEN, text, mend)


PACKAGE = "openclaw-rl"
GIB = 1 << 30
#: With less, recording turns soon fails; with less than the second, some checkpoints of a larger model do not fit.
MIN_DISK_GIB, ROOMY_DISK_GIB = 0.5, 5.0
#: Beside the weights, a server needs memory for its processes and its cache.
SERVER_GIB = 1.0
#: There if the system has a driver for NVIDIA's GPUs.
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def python(config: Config) -> Finding:
    return ok(f"{platform.python_version()} on {platform.system()} {platform.machine()}, openclaw-rl {__version__}")


def packages(config: Config) -> Finding:
    """Whether every required package is installed in a version that fits."""
    try:
        required = [Requirement(line) for line in importlib.metadata.requires(PACKAGE) or ()]
    except importlib.metadata.PackageNotFoundError:
        return note("openclaw-rl runs from its source and is not installed", "make install, or pip install .")
    needed = [r for r in required if r.marker is None or r.marker.evaluate({"extra": ""})]
    if wrong := [problem for requirement in needed if (problem := problem_with(requirement))]:
        return broken("; ".join(wrong), "pip install --upgrade openclaw-rl, or make install")
    return ok(f"all {len(needed)} that are needed")


def problem_with(requirement: Requirement) -> str:
    """What is wrong with a requirement; empty if it is met."""
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is not installed"
    fits = requirement.specifier.contains(version, prereleases=True)
    return "" if fits else f"{requirement.name} is {version}, but {requirement.specifier} is needed"


def torch_works(config: Config) -> Finding:
    try:
        import torch
    except (ImportError, OSError) as error:
        return broken(f"it cannot be loaded: {error}", "install it again: pip install --force-reinstall torch")
    product = torch.ones(2, 2) @ torch.ones(2, 2)
    if not bool((product == 2).all()):
        return broken("it computes wrong products", "install another version: pip install --force-reinstall torch")
    return ok(f"{torch.__version__}, {torch.get_num_threads()} threads")


def gpu(config: Config) -> Finding:
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        return ok(f"{torch.cuda.get_device_name()}, {free / GIB:.0f} of {total / GIB:.0f} GiB free")
    if torch.backends.mps.is_available():
        return note("an Apple GPU, which --device mps uses; that is written for it and has never run on one")
    if NVIDIA_DRIVER.exists():
        mend = "install the build for CUDA: https://pytorch.org/get-started"
        return note(f"there is an NVIDIA driver, but PyTorch {torch.__version__} finds no GPU", mend)
    return ok("none: the CPU is used")


def precision(config: Config) -> Finding:
    """The precision of the weights, and why; nothing is kept of a measurement."""
    settings = config.engine_settings
    chosen = config.sampler.precision(settings) or config.learner.precision(settings)
    return ok(chosen or f"that of the engine ({config.sampler.name})")


def memory(config: Config) -> Finding:
    """Whether the weights fit into the free memory."""
    free = usable_memory() / GIB
    has_one_copy = not config.learns or (SHARES_MEMORY and config.section(LocalOptions).device != "mps")
    needed = SERVER_GIB + weights_gib(config) * (1 if has_one_copy else 2)
    who = "server" if config.engine.takes_text else "model"
    text = f"{free:.1f} GiB free; the {who} needs about {needed:.1f} GiB"
    return ok(text) if free > needed else broken(text, "end other programs, or choose a smaller --model-name")


def weights_gib(config: Config) -> float:
    """The size of the weights in memory, or of their files; 0 if they are not here yet."""
    folder = find_model(config.policy_name, config.run.cache)
    if folder is None:
        return 0.0
    local = config.section(LocalOptions)
    if local.quantize != "none" and (size := size_of(config, config.policy_name)):
        return size.weight_bytes(2 if local.dtype == "bfloat16" else 4, BITS[local.quantize]) / GIB
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / GIB


def disk(config: Config) -> Finding:
    """Whether the folders that are written to have room."""
    rooms = {}
    for folder, option in ((config.run.folder, "--run-dir"), (config.run.cache, "--cache-dir")):
        check_usable(folder, option)
        nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        rooms[folder] = shutil.disk_usage(nearest).free / GIB
    text = ", ".join(f"{room:.1f} GiB free for {folder}" for folder, room in rooms.items())
    mend = "make room, or give --run-dir and --cache-dir folders on another disk"
    if min(rooms.values()) < MIN_DISK_GIB:
        return broken(text, mend)
    return ok(text) if min(rooms.values()) >= ROOMY_DISK_GIB else note(text, mend)


def sandbox(config: Config) -> Finding:
    """Whether programs of a model can be confined, which only environments and the coding evaluation need."""
    try:
        return ok(choose_sandbox().about)
    except ConfigError as error:
        return note(str(error))


#: A key with fewer characters can be guessed.
MIN_KEY_CHARACTERS = 16


def model(config: Config) -> Finding:
    """Whether the model is on this machine, whole."""
    name = config.policy_name
    if config.engine.takes_text:
        return asyncio.run(behind_api(config))
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


async def behind_api(config: Config) -> Finding:
    """Whether each API answers, takes the key and has the model."""
    options = config.section(UpstreamOptions)
    for url in config.sampler.urls(config.engine_settings):
        upstream = Upstream(url, options.upstream_key)
        try:
            doubt = upstream.doubt(options.upstream_model, await upstream.models())
        except ServerError as error:
            mend = "start the API, or check --upstream-url and UPSTREAM_API_KEY"
            said = f"answers {error.status}" if error.status else "does not answer"
            return broken(f"{upstream.api.url} {said}: {error.message}", mend)
        finally:
            await upstream.api.close()
        if doubt:
            return note(doubt)
    return ok(f"{options.upstream_model}, behind the API at {text_without_accounts(options.upstream_url)}")


def larger(config: Config) -> Finding:
    """Which larger model would fit, if the embedded one is used."""
    if not config.embedded:
        return ok("not looked for: you have chosen a model")
    fit = larger_model(config)
    return ok(in_words(config, fit) if fit else "none of those that are known would fit")


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


#: Asked for an answer of a few tokens, which is neither recorded nor learned from.
QUESTION = [{"role": "user", "content": "Say hello."}]
ANSWER_TOKENS = 4


def answers(config: Config) -> Finding:
    """Whether the server of the run gives a real answer. Raises UserError if it does not."""
    url = server_url(config.run.folder)
    if url is None:
        return (
            note("it is starting") if read_server(config.run.folder) else note("it is not running", "openclaw-rl serve")
        )
    key = config.server.user_key
    state = ready_state(url, key)
    if not state.get("ready"):
        return broken(
            f"{url} is not ready: {state.get('detail') or 'it does not answer'}", "look at the server's messages"
        )
    if "policy_version" not in state:
        return note(f"{url} is ready, but was not asked: it needs a key", GIVE_KEY)
    started = time.monotonic()
    with Client(url, key) as client:
        pieces = list(client.chat(QUESTION, max_tokens=ANSWER_TOKENS, store=False))
    text = f"{url} answered in {time.monotonic() - started:.1f} s with policy {state['policy_version']}"
    if not pieces:
        return broken(f"{url} gives empty answers", "look at the server's messages")
    trouble = [f"{part}: {state[part]}" for part in ("capture", "judge", "learner") if is_trouble(state.get(part))]
    return note(f"{text}; {'; '.join(trouble)}", "look at the server's messages") if trouble else ok(text)


def is_trouble(state: object) -> bool:
    """Whether a part of the server says that it does not work at the moment."""
    return isinstance(state, str) and state.startswith(("suspended", "down", "failed", "stopped"))


def clients(config: Config) -> Finding:
    """Whether the clients that `connect` has configured still fit the server."""
    connected = [name for name, setup in CLIENTS.items() if (path := setup(NO_SERVER).path) and is_connected(path)]
    if not connected:
        return ok("none is configured by openclaw-rl connect")
    url = server_url(config.run.folder)
    key = config.server.user_key
    if url is None:
        return note(f"{', '.join(connected)}: not compared, because the server is not running")
    with Client(url, key) as client:
        model = client.model()
    facts = ServerFacts(url, model["id"], model["max_input_tokens"], key)
    stale = [name for name in connected if not fits(name, facts)]
    if stale:
        mend = "; ".join(f"openclaw-rl connect {name}" for name in stale)
        return Finding(Health.NOTE, f"{', '.join(stale)}: configured for another server, model or key", mend)
    return ok(f"{', '.join(connected)}: configured for this server")


def fits(name: str, facts: ServerFacts) -> bool:
    """Whether a client's file says what the server needs."""
    setup = CLIENTS[name](facts)
    assert setup.path is not None
    assert setup.edit is not None
    try:
        return not addition(setup.path, setup.edit).is_needed
    except UserError:
        return False


#: A check gives one finding, which names it.
Check = Callable[[Config], Finding]
#: In the order that they are shown: what others depend on comes first.
CHECKS: dict[str, Check] = {
    "Python": python,
    "packages": packages,
    "PyTorch": torch_works,
    "GPU": gpu,
    "precision": precision,
    "memory": memory,
    "disk": disk,
    "permissions": permissions,
    "model": model,
    "larger": larger,
    "engine": engine,
    "sandbox": sandbox,
    "port": port,
    "keys": keys,
    "ledger": ledger,
    "server": answers,
    "clients": clients,
}


def examine(config: Config) -> Iterator[tuple[str, Finding]]:
    """Make every check. One that fails with an error that a user can fix is a finding like any other."""
    for name, examine_part in CHECKS.items():
        try:
            yield name, examine_part(config)
        except (UserError, OSError) as error:
            yield name, Finding(Health.BROKEN, str(error))
