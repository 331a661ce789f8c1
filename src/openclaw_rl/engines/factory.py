"""The protocols of sampler and learner factories, the settings that they receive, and the factory of each engine."""

import contextlib
import importlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from openclaw_rl.config.options import ConfigError, Section
from openclaw_rl.engines.base import (
    EngineUnavailable,
    Learner,
    LearnerCapabilities,
    Sampler,
    SamplerCapabilities,
    WeightForm,
)
from openclaw_rl.engines.gpus import NO_CHOICE, Split
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.memory import BITS, EngineProcess, ModelSize, Trained
from openclaw_rl.engines.options import EngineOptions, ModelOptions
from openclaw_rl.engines.registry import LEARNERS, SAMPLERS, Entry, names_code
from openclaw_rl.models import fetch_model, fetch_tokenizer
from openclaw_rl.plugins import load_plugin
from openclaw_rl.types import TrainingSettings

S = TypeVar("S", bound=Section)


class ModelFiles(Enum):
    """The files of a model that an engine needs on this machine."""

    WEIGHTS = "weights"
    TOKENIZER = "tokenizer"
    NOTHING = "nothing"
    """The model is given messages."""


class Closable(Protocol):
    def close(self) -> Awaitable[None]: ...


C = TypeVar("C", bound=Closable)


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The options that engines share, and the sections of all engines."""

    model: ModelOptions
    engine: EngineOptions
    sections: Mapping[type[Section], Section]
    training: TrainingSettings
    cache: Path
    """The folder of downloaded models."""
    policies_folder: Path
    """Where the learner's policies are written."""
    split: Split = NO_CHOICE
    """The GPUs of each role."""
    custom_loss: str | None = None
    learns: bool = True
    """Whether anything is trained."""
    max_cache_gib: float | None = None
    """The most memory for the key-value cache; None: the options of the engine decide."""
    other_urls: str = ""
    """Servers to use in place of those that the options of the engine name."""

    def section(self, kind: type[S]) -> S:
        """The options of one engine."""
        section = self.sections[kind]
        assert isinstance(section, kind)
        return section

    def for_few_sequences(self, sequences: int, lora_rank: int, cache_gib: float) -> "EngineSettings":
        """The settings of a small sampler of one policy that can run next to a server."""
        engine = self.engine.model_copy(update={"max_sequences": sequences, "policy_slots": 2})
        model = self.model.model_copy(update={"lora_rank": lora_rank})
        return replace(self, engine=engine, model=model, max_cache_gib=cache_gib)

    def for_teacher(self) -> "EngineSettings":
        """The settings of the sampler that judges and teaches. At --teacher-url, only the base model is used."""
        if not self.engine.teacher_url:
            return replace(self, split=self.split.for_other())
        engine = self.engine.model_copy(update={"learner": "auto"})
        model = self.model.model_copy(update={"lora_rank": 1})
        return replace(self, engine=engine, model=model, learns=False, other_urls=self.engine.teacher_url)

    @property
    def trains_outside(self) -> bool:
        """Whether a trainer outside this program replaces the weights of the sampler's servers."""
        return self.engine.trains_outside

    @property
    def policies_held(self) -> int:
        """How many policy versions a sampler holds in addition to the base model."""
        return self.engine.policies_held(full_weights=self.model.full_weights)

    def trained(self, policies: int) -> Trained:
        """What is trained, and that a sampler holds so many policy versions: for the memory that this takes."""
        local = self.section(LocalOptions)
        dtype = "float32" if (local.dtype, local.device) == ("auto", "mps") else local.dtype
        width = 4 if dtype == "float32" else 2
        lines = policies if self.engine.policy_per_user else 1
        bits = BITS[local.quantize]
        model = self.model
        return Trained(model.lora_rank, model.adapted_modules, width, policies, lines, bits, model.lora_experts)


class Resources:
    """Resources that several engines of one process share, such as a connection. The stack closes them."""

    def __init__(self, stack: contextlib.AsyncExitStack) -> None:
        self.stack = stack
        self._shared: dict[type[Any], Any] = {}

    def shared(self, kind: type[C], make: Callable[[], C]) -> C:
        """The only resource of this kind, created by the first call."""
        if kind not in self._shared:
            self._shared[kind] = make()
            self.stack.push_async_callback(self._shared[kind].close)
        resource: C = self._shared[kind]
        return resource


@dataclass(frozen=True, slots=True)
class TrainerStep:
    """What a trainer outside has to know about its steps."""

    batch_size: int
    max_steps: int
    hints: bool
    """Whether hints are distilled."""


class MemoryShare(NamedTuple):
    """How a server is told which share of a GPU's memory it may take."""

    option: str
    """The option with more arguments for the server."""
    argument: str


@runtime_checkable
class SamplerFactory(Protocol):
    """Makes samplers of one engine. Unless it says otherwise, they use no GPU of this machine."""

    name: str
    model_files: ModelFiles
    default_model: str
    """The model to use without --model-name."""
    takes_urls: bool = False
    """Whether it can use servers that run already, such as those of --teacher-url."""
    memory_share: MemoryShare | None = None
    """None if its memory cannot be set in this way."""
    has_lines: bool = False
    """Whether its samplers serve several lines of policies (`engines.lines.SamplerOfLines`)."""

    def check(self, settings: EngineSettings) -> None:
        """Find what is wrong before anything is loaded. Raises UserError."""

    def capabilities(self, settings: EngineSettings) -> SamplerCapabilities:
        """What its samplers can load, record and score."""

    def open(self, settings: EngineSettings, resources: Resources, folder: Path, name: str) -> Sampler:
        """A sampler, not started yet, of the model `name`, whose files are in `folder`."""

    def start_commands(self, settings: EngineSettings) -> list[list[str]]:
        """The commands that start its servers, to be shown; empty if it starts none."""
        return []

    def urls(self, settings: EngineSettings) -> list[str]:
        """The servers that run already and that it uses for the policy. Raises ConfigError."""
        return []

    def why_no_gpus(self, settings: EngineSettings) -> str:
        """Why it cannot use the GPUs of `settings.split`, as the end of a sentence; empty if it can."""
        return f"the sampler {self.name} has no GPU of this machine"

    def processes(self, settings: EngineSettings, size: ModelSize | None) -> list[EngineProcess]:
        """The processes of one sampler, with the GPUs of `settings.split`. The model has this size, if it is known."""
        return [EngineProcess(f"{self.name}, elsewhere")]

    def precision(self, settings: EngineSettings) -> str:
        """The precision of its weights and why, if this program chooses it; else empty."""
        return ""

    def notes(self, settings: EngineSettings) -> str:
        """What is special about how it computes the model, to be shown; empty if nothing is."""
        return ""


class LearnerFactory(Protocol):
    """Makes learners of one engine. Unless it says otherwise, they use no GPU of this machine."""

    name: str
    model_files: ModelFiles
    counts_gpus: bool = False
    """Whether --train-gpus and --rollout-gpus are numbers for its command line, perhaps of other machines' GPUs."""
    has_lines: bool = False
    """Whether its learners train several lines of policies (`engines.lines.LearnerOfLines`)."""

    def check(self, settings: EngineSettings) -> None:
        """Find what is wrong before anything is loaded. Raises UserError."""

    def capabilities(self, settings: EngineSettings) -> LearnerCapabilities:
        """What its learners write."""

    def open(self, settings: EngineSettings, resources: Resources, folder: Path, sampler: Sampler) -> Learner:
        """A learner for the policy that `sampler` serves. Raises EngineUnavailable."""

    def trainer_command(self, settings: EngineSettings, step: TrainerStep) -> str:
        """The command that starts its trainer, for a shell; empty if it runs in this program or is a service."""
        return ""

    def why_no_gpus(self, settings: EngineSettings) -> str:
        """Why it cannot use GPUs of this machine, as the end of a sentence; empty if it can."""
        return f"the learner {self.name} has no GPU of this machine"

    def processes(
        self, settings: EngineSettings, sampler: SamplerFactory, size: ModelSize | None
    ) -> list[EngineProcess]:
        """The processes of the learner for a policy that `sampler` serves. The model has this size, if it is known."""
        return [EngineProcess(f"{self.name}, elsewhere")]

    def precision(self, settings: EngineSettings) -> str:
        """The precision of its weights and why, if this program chooses it; else empty."""
        return ""

    def notes(self, settings: EngineSettings) -> str:
        """What is special about how it computes the model, to be shown; empty if nothing is."""
        return ""


def sampler_factory(name: str) -> SamplerFactory:
    """The factory of a sampler: of an engine, or SAMPLER of the user's code (`path/file.py`). Raises ConfigError."""
    if not names_code(name):
        factory: SamplerFactory = _find(SAMPLERS, name, "--sampler", "SAMPLER")
        return factory
    given = load_plugin(name, "--sampler", ("SAMPLER",))
    if not isinstance(given, SamplerFactory):
        raise ConfigError(f"--sampler {name} is no sampler: it needs what engines.factory.SamplerFactory has.")
    return given


def learner_factory(name: str) -> LearnerFactory:
    """The factory of a learner. Raises ConfigError."""
    factory: LearnerFactory = _find(LEARNERS, name, "--learner", "LEARNER")
    return factory


def _find(table: Mapping[str, Entry], name: str, option: str, attribute: str) -> Any:
    if name not in table:
        raise ConfigError(f"{option} {name} is not known: use one of {', '.join(table)}.")
    return getattr(importlib.import_module(table[name].module), attribute)


def check_pair(sampler: SamplerFactory, learner: LearnerFactory, settings: EngineSettings) -> None:
    """Refuse a sampler that cannot load what the learner writes. Raises ConfigError."""
    writes = learner.capabilities(settings).writes
    loads = sampler.capabilities(settings).loads
    if not writes <= loads:
        raise ConfigError(
            f"--sampler {sampler.name} does not work with --learner {learner.name}: the learner writes "
            f"{' or '.join(sorted(writes))}, and the sampler loads {' or '.join(sorted(loads))}."
        )


def sampler_that_loads(form: WeightForm, settings: EngineSettings) -> SamplerFactory:
    """The first engine whose samplers load policies of this form. Raises EngineUnavailable if there is none."""
    for factory in map(sampler_factory, SAMPLERS):
        if form in factory.capabilities(settings).loads:
            return factory
    raise EngineUnavailable(f"No sampler loads {form}.")


def fetch(files: ModelFiles, name: str | None, cache: Path) -> Path:
    """The folder with these files of a model, downloaded if necessary. Raises ModelNotFound.

    If nothing is needed, it is the folder of all downloads.
    """
    if files is ModelFiles.WEIGHTS:
        return fetch_model(name, cache)
    if files is ModelFiles.NOTHING:
        return cache
    assert name is not None
    return fetch_tokenizer(name, cache)
