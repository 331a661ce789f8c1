"""The split of the GPUs: which process runs on which, and whether its memory suffices. For --dry-run and the start."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.app.assembly import judge_setup
from openclaw_rl.app.config import Config
from openclaw_rl.config.options import ConfigError, flag
from openclaw_rl.engines.gpus import GIB, Split, Visible, read_choice, visible_gpus
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.memory import Memory, ModelSize, Trained, learner_memory, read_size, sampler_memory
from openclaw_rl.models import BadModelFolder, ModelNotFound, find_model, read_json_object

#: Engines whose servers this program can start on chosen GPUs.
SERVERS = ("vllm", "sglang")
LOCAL = "local"
#: The learner whose GPUs are in its own command line, and perhaps on other machines.
SLIME = "slime"
#: The role of the model that is not the policy.
OTHER = "judge and teacher"


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
    split = config.split(visible)
    for role in config.gpus.given:
        if config.section(LocalOptions).on_ray and not isinstance(read_choice(getattr(config.gpus, role)), int):
            raise ConfigError(f"{flag(role)} {getattr(config.gpus, role)}: Ray chooses the GPUs, so give a count.")
        if reason := why_unused(config, role):
            raise ConfigError(f"{flag(role)} {getattr(config.gpus, role)}: {reason}.")
    if config.learner.name == SLIME:
        return
    for option, sampler in (("--rollout-gpus", split), ("--judge-gpus with --teacher-gpus", split.for_other())):
        if len(sampler.sampling) > 1 and config.sampler.name == LOCAL:
            raise ConfigError(
                f"{option}: these are {len(sampler.sampling)} GPUs, and a local sampler uses one: give it one, or use "
                "--sampler vllm or sglang."
            )
    check_memory(config, visible)


def check_seen(config: Config) -> None:
    """Refuse chosen GPUs on a machine that shows none. Raises ConfigError."""
    if config.section(LocalOptions).on_ray:
        return
    if config.gpus.given and visible_gpus().count is None and config.learner.name != SLIME:
        role = config.gpus.given[0]
        raise ConfigError(f"{flag(role)} {getattr(config.gpus, role)}: this machine has no GPU (no nvidia-smi).")


def why_unused(config: Config, role: str) -> str:
    """Why nothing would run on the GPUs of a role; empty if something would."""
    if config.learner.name == SLIME and role in ("train_gpus", "rollout_gpus"):
        return ""
    if role == "train_gpus":
        if not config.learns:
            return "nothing is trained"
        return "" if config.learner.name == LOCAL else f"the learner {config.learner.name} has no GPU of this machine"
    name = config.sampler.name
    if name in SERVERS and config.value(f"{name}_url"):
        return f"--{name}-url names servers that run already"
    if name not in (*SERVERS, LOCAL):
        return f"the sampler {name} has no GPU of this machine"
    if role != "rollout_gpus" and config.engine.teacher_url:
        return "--teacher-url names servers that run already"
    if role != "rollout_gpus" and not judge_setup(config).uses_model:
        return "no model on an engine judges or teaches"
    return ""


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
    split = config.split(visible)
    size = size_of(config, config.policy_name)
    parts = sampler_parts(config, "policy", split, size)
    if config.learns:
        parts += learner_parts(config, split, size)
    if config.has_other_model and judge_setup(config).uses_model:
        size = size_of(config, config.model.teacher_model_name or config.policy_name)
        parts += sampler_parts(config, OTHER, split.for_other(), size)
    return parts


def sampler_parts(config: Config, role: str, split: Split, size: ModelSize | None) -> list[Part]:
    name = config.sampler.name
    if name not in (*SERVERS, LOCAL):
        return [Part(role, f"{name}, elsewhere", (), None)]
    other_urls = config.engine.teacher_url if role == OTHER else ""
    if name in SERVERS and (urls := other_urls or config.value(f"{name}_url")):
        return [Part(role, f"{name} at {urls}", (), None)]
    process = "local sampler" if name == LOCAL else f"{name} server"
    servers = (split.local_sampler,) if name == LOCAL else split.policy or ((),)
    parts = []
    for number, devices in enumerate(servers, start=1):
        memory = None
        if size is not None:
            context = context_of(config, size)
            memory = sampler_memory(size, trained_of(config), gpus=max(1, len(devices)), context=context)
        parts.append(Part(role, f"{process} {number}" if len(servers) > 1 else process, devices, memory))
    return parts


def learner_parts(config: Config, split: Split, size: ModelSize | None) -> list[Part]:
    if config.learner.name != LOCAL:
        return [Part("learner", f"{config.learner.name}, elsewhere", (), None)]
    samples_here = config.sampler.name == LOCAL
    devices, local = split.local_learner(samples_here=samples_here), config.section(LocalOptions)
    ranks = len(local.rank_devices(len(split.learner)))
    parts = []
    for rank in range(ranks):
        # A local sampler and the learner on the same GPU use one copy of the base weights.
        shares = samples_here and not local.on_ray and devices[rank : rank + 1] == split.local_sampler
        memory = None
        if size is not None:
            trained = trained_of(config)
            memory = learner_memory(size, trained, ranks=ranks, sharded=local.shard_weights, has_weights=not shares)
        process = f"learner rank {rank}" if ranks > 1 else "local learner"
        parts.append(Part("learner", process, devices[rank : rank + 1], memory))
    return parts


def trained_of(config: Config) -> Trained:
    # If all weights are trained, a server of another project holds one version.
    one_version = config.model.full_weights and config.sampler.name in SERVERS
    return Trained(
        rank=config.model.lora_rank,
        modules=config.model.adapted_modules,
        width=4 if config.section(LocalOptions).dtype == "float32" else 2,
        policies=0 if one_version else config.engine_settings.policies_held,
    )


def context_of(config: Config, size: ModelSize) -> int:
    """The tokens for which a sampler must have room, or it does not start."""
    asked = config.engine.max_context_tokens
    if asked is not None:
        return asked
    # Without the option, the local sampler takes a context that fits.
    return 0 if config.sampler.name == LOCAL else size.max_context


def size_of(config: Config, name: str) -> ModelSize | None:
    """The sizes of a model whose config.json is on this machine; else None."""
    try:
        folder = Path(name).expanduser()
        found = folder if (folder / "config.json").is_file() else find_model(name, config.run.cache)
        return read_size(read_json_object(found / "config.json")) if found else None
    except (BadModelFolder, ModelNotFound):
        return None
