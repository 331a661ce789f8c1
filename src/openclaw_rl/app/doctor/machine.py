"""Checks of the machine and of what is installed on it."""

import importlib.metadata
import platform
import shutil
from pathlib import Path

from packaging.requirements import Requirement

from openclaw_rl import __version__
from openclaw_rl.app.config import Config
from openclaw_rl.app.doctor.finding import Finding, broken, note, ok
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.host import usable_memory
from openclaw_rl.ledger.lock import check_usable
from openclaw_rl.models import find_model
from openclaw_rl.sandbox.kinds import choose_sandbox

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
    needed = SERVER_GIB + weights_gib(config)
    text = f"{free:.1f} GiB free; the model needs about {needed:.1f} GiB"
    return ok(text) if free > needed else broken(text, "end other programs, or choose a smaller --model-name")


def weights_gib(config: Config) -> float:
    """The size of the weights on this machine; 0 if they are not here yet."""
    folder = find_model(config.policy_name, config.run.cache)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors")) / GIB if folder else 0.0


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
