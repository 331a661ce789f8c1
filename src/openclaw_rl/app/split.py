"""The split of the GPUs: which process runs on which, and whether its memory suffices. For --dry-run and the start."""

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path

from openclaw_rl.app.assembly import judge_setup
from openclaw_rl.app.config import Config
from openclaw_rl.config.options import ConfigError, flag
from openclaw_rl.engines.factory import EngineSettings
from openclaw_rl.engines.gpus import GIB, Visible, read_choice, visible_gpus
from openclaw_rl.engines.local.family_size import size_of_model
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.memory import EngineProcess, Memory, ModelSize, known_models
from openclaw_rl.models import BadModelFolder, ModelNotFound, find_model, read_json_object


@dataclass(frozen=True, slots=True)
class Part:
    """One process and the GPUs that it uses."""

    role: str
    process: str
    devices: tuple[int, ...]
    """Empty: those that the process chooses itself."""
    memory: Memory | None
    """On each of its GPUs; None if the model's sizes are not known here."""


def check_split(config: Config, visible: Visible | None = None) -> None:
    """Refuse GPUs that nothing would use, and a split that does not fit. Raises ConfigError."""
    visible = visible or config.visible
    settings = settings_on(config, visible)
    for role in config.gpus.given:
        if config.section(LocalOptions).on_ray and not isinstance(read_choice(getattr(config.gpus, role)), int):
            raise ConfigError(f"{flag(role)} {getattr(config.gpus, role)}: Ray chooses the GPUs, so give a count.")
        if reason := why_unused(config, settings, role):
            raise ConfigError(f"{flag(role)} {getattr(config.gpus, role)}: {reason}.")
    if not config.learner.counts_gpus:
        check_memory(config, visible)


def check_seen(config: Config) -> None:
    """Refuse chosen GPUs on a machine that shows none. Raises ConfigError."""
    if config.section(LocalOptions).on_ray:
        return
    if config.gpus.given and visible_gpus().count is None and not config.learner.counts_gpus:
        role = config.gpus.given[0]
        raise ConfigError(f"{flag(role)} {getattr(config.gpus, role)}: this machine has no GPU (no nvidia-smi).")


def why_unused(config: Config, settings: EngineSettings, role: str) -> str:
    """Why nothing would run on the GPUs of a role; empty if something would."""
    if config.learner.counts_gpus and role in ("train_gpus", "rollout_gpus"):
        return ""
    if role == "train_gpus":
        return config.learner.why_no_gpus(settings) if config.learns else "nothing is trained"
    if role == "rollout_gpus":
        return config.sampler.why_no_gpus(settings)
    if reason := config.sampler.why_no_gpus(settings.for_teacher()):
        return reason
    if config.engine.teacher_url:
        return "--teacher-url names servers that run already"
    return "" if judge_setup(config).uses_model else "no model on an engine judges or teaches"


def check_memory(config: Config, visible: Visible) -> None:
    """Refuse a split whose parts need more than a GPU has, with the arithmetic. Raises ConfigError."""
    on_gpu: dict[int, list[Part]] = defaultdict(list)
    for part in parts_of(config, visible):
        for device in part.devices:
            on_gpu[device].append(part)
    for device, parts in sorted(on_gpu.items()):
        room = room_of(config, device, visible)
        known = [(part, part.memory) for part in parts if part.memory is not None]
        needed = sum(memory.total for _part, memory in known)
        if room is not None and needed > room:
            terms = "; ".join(f"{part.role}: {in_words(memory)}" for part, memory in known)
            raise ConfigError(
                f"GPU {device} needs {gib(needed)} GiB ({terms}), and has {gib(room)} GiB: give these parts more GPUs, "
                "a smaller model, a lower --lora-rank or --max-context-tokens."
            )


def room_of(config: Config, device: int, visible: Visible) -> float | None:
    """The memory of a GPU; None if it is not known."""
    if config.gpus.gpu_memory is not None:
        return config.gpus.gpu_memory * GIB
    return visible.memory[device] if visible.memory and device < len(visible.memory) else None


def in_words(memory: Memory) -> str:
    return " + ".join(f"{name} {gib(size)}" for name, size in memory.parts.items() if size)


def gib(size: float) -> str:
    """Bytes in GiB; what is small is not rounded to nothing."""
    return f"{size / GIB:.1f}" if size >= GIB / 20 else f"{size / GIB:.3f}"


def parts_of(config: Config, visible: Visible | None = None) -> list[Part]:
    """The processes of a server, with their GPUs and what they need of each."""
    settings = settings_on(config, visible)
    size = size_of(config, config.policy_name)
    parts = in_role("policy", config.sampler.processes(settings, size))
    if config.learns:
        parts += in_role("learner", config.learner.processes(settings, config.sampler, size))
    if config.has_other_model and judge_setup(config).uses_model:
        size = size_of(config, config.model.teacher_model_name or config.policy_name)
        parts += in_role("judge and teacher", config.sampler.processes(settings.for_teacher(), size))
    return parts


def in_role(role: str, processes: list[EngineProcess]) -> list[Part]:
    return [Part(role, process.name, process.devices, process.memory) for process in processes]


def settings_on(config: Config, visible: Visible | None) -> EngineSettings:
    """The settings of the engines on these GPUs."""
    return replace(config.engine_settings, split=config.split(visible))


def size_of(config: Config, name: str) -> ModelSize | None:
    """The sizes of a model whose config.json is on this machine, or of a known one; else None."""
    try:
        folder = Path(name).expanduser()
        found = folder if (folder / "config.json").is_file() else find_model(name, config.run.cache)
        return size_of_model(read_json_object(found / "config.json") if found else known_models().get(name, {}))
    except (BadModelFolder, ModelNotFound):
        return None
