"""Which GPUs each role of a server gets: options as counts or lists, and their assignment to devices."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from pydantic import field_validator

from openclaw_rl.config.options import ConfigError, Section, flag, option

#: The options of the roles, in the order in which counts are served.
ROLES = ("train_gpus", "rollout_gpus", "judge_gpus", "teacher_gpus")
#: How long nvidia-smi may take.
QUERY_SECONDS = 20
MIB = 1 << 20
GIB = 1 << 30


class GpuOptions(Section):
    """How the GPUs of this machine are split."""

    heading = "GPUs"
    train_gpus: str = option(
        "",
        "GPUs of the learner: how many, or which (0,1 are two; 0, is one).",
        env=("TRAIN_GPUS", "ACTOR_GPUS"),
        shown="the first",
    )
    rollout_gpus: str = option(
        "", "GPUs that the policy samples on.", shown="all for vLLM and SGLang, else the learner's first"
    )
    judge_gpus: str = option(
        "",
        "GPUs of a server of its own for the model that judges and teaches.",
        env=("JUDGE_GPUS", "PRM_GPUS"),
        shown="no server of its own: it shares the policy's",
    )
    teacher_gpus: str = option(
        "", "More GPUs for the same server.", env=("TEACHER_GPUS", "PRM_TEACHER_GPUS"), shown="no more GPUs"
    )
    num_gpus: int | None = option(None, "GPUs that may be used.", shown="those of this machine", ge=0)
    gpu_memory: float | None = option(
        None, "Memory of each GPU in GiB, to check whether a split fits.", shown="what nvidia-smi says", gt=0
    )
    rollout_tp: int | None = option(
        None,
        "GPUs that one vLLM or SGLang server of the policy splits its model over; more GPUs run further servers.",
        env=("ROLLOUT_TP", "TP"),
        shown="all: one server",
        ge=1,
    )
    judge_tp: int | None = option(
        None, "The same for the judge and teacher.", env=("JUDGE_TP", "PRM_TP"), shown="all: one server", ge=1
    )

    @field_validator(*ROLES)
    @classmethod
    def _is_a_choice(cls, text: str) -> str:
        read_choice(text)
        return text.strip()

    @property
    def given(self) -> list[str]:
        """The roles for which GPUs were chosen."""
        return [role for role in ROLES if read_choice(getattr(self, role)) not in (0, ())]

    def split(self, visible: "Visible") -> "Split":
        """The devices of each role. Raises ConfigError."""
        total = self.num_gpus if self.num_gpus is not None else visible.count
        devices = assign({role: read_choice(getattr(self, role)) for role in ROLES}, total)
        other = tuple(dict.fromkeys((*devices["judge_gpus"], *devices["teacher_gpus"])))
        return Split(
            learner=devices["train_gpus"],
            policy=groups_of(devices["rollout_gpus"], self.rollout_tp, "--rollout-gpus", "--rollout-tp"),
            other=groups_of(other, self.judge_tp, "--judge-gpus and --teacher-gpus", "--judge-tp"),
        )


@dataclass(frozen=True, slots=True)
class Split:
    """The devices of each role; none where no choice was made."""

    learner: tuple[int, ...] = ()
    policy: tuple[tuple[int, ...], ...] = ()
    """One entry for each server of the policy: the devices that its model is split over."""
    other: tuple[tuple[int, ...], ...] = ()
    """The same for the servers of the model that judges and teaches."""

    @property
    def sampling(self) -> tuple[int, ...]:
        """All devices of the policy's servers."""
        return tuple(device for server in self.policy for device in server)

    @property
    def shares_gpus(self) -> bool:
        """Whether the policy's sampler and the learner may use the same GPU."""
        return not (self.sampling and self.learner) or bool(set(self.sampling) & set(self.learner))

    @property
    def local_sampler(self) -> tuple[int, ...]:
        """The GPU of a local sampler; by default the learner's, so that they share the base weights."""
        return (self.sampling or self.learner)[:1]

    def local_learner(self, *, samples_here: bool) -> tuple[int, ...]:
        """The GPUs of the local learner; by default that of a local sampler, if there is one."""
        return self.learner or (self.sampling[:1] if samples_here else ())

    def for_other(self) -> "Split":
        """The split as the engine of the model that judges and teaches sees it: that one takes the policy's place."""
        return Split(self.learner, self.other or self.policy, ())


#: Every process uses what it sees.
NO_CHOICE = Split()


@dataclass(frozen=True, slots=True)
class Visible:
    """The GPUs that this process sees."""

    memory: tuple[int, ...] | None
    """Bytes of each; None if nvidia-smi is not there, so that nothing is known."""

    @property
    def count(self) -> int | None:
        return None if self.memory is None else len(self.memory)


def read_choice(text: str) -> int | tuple[int, ...]:
    """A count, or a list of devices if there is a comma. Raises ValueError."""
    parts = [part.strip() for part in text.split(",")]
    numbers = [part for part in parts if part]
    if not all(part.isascii() and part.isdigit() for part in numbers):
        raise ValueError("give a count of GPUs such as 4, or their numbers such as 0,1")
    if len(parts) == 1:
        return int(text) if text.strip() else 0
    devices = tuple(map(int, numbers))
    if len(set(devices)) < len(devices):
        raise ValueError("a GPU is named twice")
    return devices


def assign(choices: Mapping[str, int | tuple[int, ...]], total: int | None) -> dict[str, tuple[int, ...]]:
    """Devices for each role: lists as they are, counts the lowest numbers that no list names. Raises ConfigError."""
    named = {device for choice in choices.values() if isinstance(choice, tuple) for device in choice}
    counts = {role: choice for role, choice in choices.items() if isinstance(choice, int) and choice}
    needed = sum(counts.values())
    if total is not None and named and max(named) >= total:
        role = next(r for r, choice in choices.items() if isinstance(choice, tuple) and max(named) in choice)
        raise ConfigError(f"{flag(role)} names GPU {max(named)}, and there are {total}, which are numbered from 0.")
    if total is not None and len(named) + needed > total:
        terms = [f"{flag(role)} {count}" for role, count in counts.items()]
        terms += [f"{len(named)} named ones"] if named else []
        raise ConfigError(f"{' + '.join(terms)} are {len(named) + needed} GPUs, and there are {total}.")
    free = iter(device for device in range(len(named) + needed + max(named, default=0) + 1) if device not in named)
    return {
        role: choice if isinstance(choice, tuple) else tuple(next(free) for _ in range(choice))
        for role, choice in choices.items()
    }


def groups_of(devices: Sequence[int], size: int | None, of_devices: str, of_size: str) -> tuple[tuple[int, ...], ...]:
    """Devices in groups of one size, by default in one group. Raises ConfigError."""
    if not devices:
        return ()
    size = size or len(devices)
    if len(devices) % size:
        left = len(devices) % size
        raise ConfigError(f"{of_devices}: these are {len(devices)} GPUs, and {of_size} {size} leaves {left} over.")
    return tuple(tuple(devices[start : start + size]) for start in range(0, len(devices), size))


def environment_of(devices: Sequence[int]) -> dict[str, str]:
    """The variable that shows a process these devices only; empty for all.

    If this process sees only some of the machine's GPUs, numbers count those.
    """
    if not devices:
        return {}
    seen = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    names = [seen[device] if device < len(seen) else str(device) for device in devices]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names)}


def has_cuda() -> bool:
    """Whether this machine has an NVIDIA GPU, found out without loading PyTorch."""
    return shutil.which("nvidia-smi") is not None


@cache
def visible_gpus() -> Visible:
    """The GPUs that this process sees, found out without loading PyTorch."""
    if not has_cuda():
        return Visible(None)
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=QUERY_SECONDS, check=True)
        memory = [int(line) * MIB for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return Visible(None)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if seen is None:
        return Visible(tuple(memory))
    names = [name.strip() for name in seen.split(",") if name.strip()]
    # GPUs can also be named by their identifiers; those of one machine are alike.
    return Visible(tuple(memory[int(n)] if n.isdigit() and int(n) < len(memory) else memory[0] for n in names))
