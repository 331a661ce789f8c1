"""Which larger model would fit on this machine, for those who still run the embedded one."""

import shlex
from dataclasses import replace
from typing import NamedTuple

from openclaw_rl.app.config import Config
from openclaw_rl.app.split import gib, room_of
from openclaw_rl.config.options import Section
from openclaw_rl.engines.gpus import Visible
from openclaw_rl.engines.host import usable_memory
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.memory import ModelSize, known_models, read_size
from openclaw_rl.models import EMBEDDED

#: The context of the suggested command, and of the table in docs/engines.md.
CONTEXT = 8192
#: How much more than what is computed a device has to have: activations, and programs beside ours.
HEADROOM = 2
#: On a CPU, what fits may be too slow: on two cores a step of the embedded model takes seconds, and of this minutes.
MAX_CPU_PARAMETERS = 2e9


class Fit(NamedTuple):
    """A model that fits, and why."""

    name: str
    needed: float
    room: float
    on_gpu: bool
    slower: float
    """How much more there is to compute than for the embedded model."""


def in_words(config: Config, fit: Fit) -> str:
    """What fits, and the command that serves it. A run belongs to one model, so it has a folder of its own."""
    device = "the GPU" if fit.on_gpu else f"the memory, about {fit.slower:.0f} times slower"
    words = ["openclaw-rl", "serve", "--model-name", fit.name, "--max-context-tokens", str(CONTEXT)]
    words += ["--preset", config.run.preset] if config.run.preset != "none" else []
    words += ["--run-dir", f"runs/{fit.name.rpartition('/')[2].lower()}"]
    return f"{fit.name} fits {device} ({gib(fit.needed)} of {gib(fit.room)} GiB and activations): {shlex.join(words)}"


def larger_model(config: Config, visible: Visible | None = None, free: int | None = None) -> Fit | None:
    """The largest known model that fits; None if there is none, or if the model was chosen.

    `visible` and `free` are the GPUs and the free memory of another machine than this one.
    """
    local = config.section(LocalOptions)
    if not config.embedded or local.on_ray:
        return None
    gpu = None if local.device == "cpu" else room_of(config, 0, visible or config.visible)
    room = gpu if gpu is not None else usable_memory() if free is None else free
    sizes = {name: size for name, sizes in known_models().items() if (size := read_size(sizes))}
    base = sizes[EMBEDDED].parameters
    found = None
    for name, size in sizes.items():
        needed = needed_by(config, size, on_gpu=gpu is not None)
        slow = gpu is None and size.parameters > MAX_CPU_PARAMETERS
        if size.parameters > base and HEADROOM * needed <= room and not slow:
            found = Fit(name, needed, room, gpu is not None, size.parameters / base)
    return found


def needed_by(config: Config, size: ModelSize, *, on_gpu: bool) -> float:
    """Bytes that a server of these options needs with a model of this size, all on one device."""
    settings = config.engine_settings
    engine = settings.engine.model_copy(update={"max_context_tokens": CONTEXT})
    local = settings.section(LocalOptions)
    if local.dtype == "auto" and not on_gpu:
        local = local.model_copy(update={"dtype": "float32"})
    sections: dict[type[Section], Section] = {**settings.sections, LocalOptions: local}
    settings = replace(settings, engine=engine, sections=sections)
    processes = config.sampler.processes(settings, size)
    if config.learns:
        processes += config.learner.processes(settings, config.sampler, size)
    return sum(process.memory.total for process in processes if process.memory)
