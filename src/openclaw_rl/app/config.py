"""All options of a server: the sections of its parts, values derived from several, and those that a run stores."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from pydantic import ValidationError

from openclaw_rl.api.options import ServerOptions
from openclaw_rl.config.general import RunOptions, with_preset
from openclaw_rl.config.options import (
    ConfigError,
    Section,
    fields_of,
    flag,
    option,
    option_of,
    problem,
    read,
    read_file,
    shown_default,
)
from openclaw_rl.engines.gpus import GpuOptions, Split, Visible, visible_gpus
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.options import EngineOptions, ModelOptions
from openclaw_rl.engines.registry import SAMPLERS, backends, default_backend, engine_sections
from openclaw_rl.engines.upstream.options import UpstreamOptions
from openclaw_rl.http_client import text_without_accounts
from openclaw_rl.judge.options import JudgeOptions
from openclaw_rl.learn.checkpoints import Checkpoints, line_folder
from openclaw_rl.learn.options import TrainingOptions
from openclaw_rl.ledger.options import CaptureOptions, NotesOptions
from openclaw_rl.methods.base import Method
from openclaw_rl.methods.options import MethodOptions
from openclaw_rl.methods.registry import check_options, make_method
from openclaw_rl.models import CLOUD_MODEL, CLOUD_SERVED_NAME, EMBEDDED, EMBEDDED_SERVED_NAME
from openclaw_rl.types import SHARED, TrainingSettings

if TYPE_CHECKING:
    from openclaw_rl.engines.factory import EngineSettings, LearnerFactory, SamplerFactory


class RolloutOptions(Section):
    """Rollouts by the user's code."""

    heading = "Training"
    rollout_function_path: str | None = option(
        None,
        "Your own function that runs beside the server and calls its API: path/file.py or package.module:name.",
        shown="no function",
    )


S = TypeVar("S", bound=Section)

SECTIONS: tuple[type[Section], ...] = (
    MethodOptions,
    ModelOptions,
    TrainingOptions,
    RolloutOptions,
    ServerOptions,
    JudgeOptions,
    CaptureOptions,
    NotesOptions,
    EngineOptions,
    *engine_sections(),
    GpuOptions,
    RunOptions,
)
FIELDS = fields_of(SECTIONS)


class SectionOf(Generic[S]):
    """An attribute of a configuration: one of its sections."""

    def __init__(self, kind: type[S]) -> None:
        self.kind = kind

    def __get__(self, config: "Config", owner: type["Config"]) -> S:
        return config.section(self.kind)


@dataclass(frozen=True)
class Config:
    """The resolved options. Parts receive their own sections; only `app` and `cli` see all of them."""

    sections: Mapping[type[Section], Section]

    method = SectionOf(MethodOptions)
    model = SectionOf(ModelOptions)
    training = SectionOf(TrainingOptions)
    rollout = SectionOf(RolloutOptions)
    server = SectionOf(ServerOptions)
    judge = SectionOf(JudgeOptions)
    capture = SectionOf(CaptureOptions)
    notes = SectionOf(NotesOptions)
    engine = SectionOf(EngineOptions)
    gpus = SectionOf(GpuOptions)
    run = SectionOf(RunOptions)

    @classmethod
    def of(cls, **values: Any) -> "Config":
        """Build from options by name; the others keep their defaults. Raises ValidationError and ConfigError."""
        values = with_preset(values)
        unknown = values.keys() - FIELDS.keys()
        if unknown:
            raise ConfigError(f"There is no option {', '.join(map(flag, sorted(unknown)))}.")
        config = cls({kind: kind(**_some(values, kind)) for kind in SECTIONS})
        config.check_together()
        return config

    def check_together(self) -> None:
        """Refuse options of different sections that contradict each other. Raises ConfigError."""
        check_options(self.method)
        if self.method.baseline == "batch" and self.training.batch_size == 1:
            raise ConfigError("--baseline batch needs --batch-size 2 or more: one sample is its own mean.")
        if self.method.step_reward_coef and self.method.baseline != "group":
            raise ConfigError("--step-reward-coef needs --baseline group: steps are compared within their group.")
        if self.judge.step_judge and not self.method.step_reward_coef:
            raise ConfigError("--step-judge needs --step-reward-coef: without it the scores of steps have no effect.")

    def section(self, kind: type[S]) -> S:
        section = self.sections[kind]
        assert isinstance(section, kind)
        return section

    # Values derived from several options.

    @property
    def backend(self) -> str:
        """The backend that `auto` stands for."""
        return default_backend(self.sections) if self.engine.backend == "auto" else self.engine.backend

    @property
    def sampler(self) -> "SamplerFactory":
        """The engine that samples. Raises ConfigError."""
        from openclaw_rl.engines.factory import sampler_factory

        return sampler_factory(self.backend if self.engine.sampler == "auto" else self.engine.sampler)

    @property
    def learner(self) -> "LearnerFactory":
        """The engine that trains. Raises ConfigError."""
        from openclaw_rl.engines.factory import learner_factory

        return learner_factory(self.backend if self.engine.learner == "auto" else self.engine.learner)

    @cached_property
    def learning_method(self) -> Method:
        """The method, made from its options. Raises ConfigError. Where the weights are elsewhere, only scores count."""
        return make_method(self.method.model_copy(update={"method": "rl"}) if self.engine.takes_text else self.method)

    @property
    def engine_settings(self) -> "EngineSettings":
        """The settings that engines receive."""
        from openclaw_rl.engines.factory import EngineSettings

        return EngineSettings(
            model=self.model,
            engine=self.engine,
            sections={kind: self.sections[kind] for kind in engine_sections()},
            training=self.training_settings,
            cache=self.run.cache,
            policies_folder=(self.run.folder / "policies").resolve(),
            split=self.split(),
            custom_loss=self.training.custom_loss_function_path,
            learns=self.learns,
        )

    def split(self, visible: Visible | None = None) -> Split:
        """The GPUs of each role, of those that this process sees or Ray has. Raises ConfigError."""
        return self.gpus.split(visible or self.visible)

    @property
    def visible(self) -> Visible:
        """The GPUs that can be chosen. How many a Ray cluster has is not known before it is connected."""
        return Visible(None) if self.section(LocalOptions).on_ray else visible_gpus()

    @property
    def training_settings(self) -> TrainingSettings:
        """The settings of a training step."""
        # Trainers outside replace all weights.
        full_weights = self.model.full_weights or self.engine.trains_outside
        return self.training.settings(full_weights=full_weights, epochs=self.method.train_epochs, seed=self.run.seed)

    @property
    def trainer_command(self) -> str:
        """The command that starts a trainer outside this program; empty if there is none."""
        from openclaw_rl.engines.factory import TrainerStep

        training = self.training
        hints = self.learning_method.teacher_request is not None
        step = TrainerStep(training.batch_size, training.max_steps, hints)
        return self.learner.trainer_command(self.engine_settings, step)

    @property
    def policy_name(self) -> str:
        """The policy's model: --model-name, or the sampler's default; behind another API, its name there."""
        if self.engine.takes_text:
            return self.section(UpstreamOptions).upstream_model
        return self.model.model_name or self.sampler.default_model

    @property
    def embedded(self) -> bool:
        """Whether the policy is the embedded model."""
        return self.policy_name == EMBEDDED == self.sampler.default_model

    @property
    def served_name(self) -> str:
        """The model's name in the API."""
        if self.server.served_model_name:
            return self.server.served_model_name
        known = {CLOUD_MODEL: CLOUD_SERVED_NAME}
        if self.model.model_name is None:
            known[EMBEDDED] = EMBEDDED_SERVED_NAME
        name = self.policy_name
        return known.get(name) or Path(name).resolve().name.removesuffix(".gguf").lower()

    @property
    def has_other_model(self) -> bool:
        """Whether another model, or the base model on other servers or GPUs, judges and teaches."""
        differs = self.model.teacher_model_name not in (None, self.model.model_name)
        return differs or bool(self.engine.teacher_url) or bool(self.split().other)

    @property
    def notes_to_teach(self) -> NotesOptions:
        """The options of notes. What one person wishes is taught to a line of their own, if they have one."""
        personal = self.notes.distil_personal or self.engine.policy_per_user
        return self.notes.model_copy(update={"distil_personal": personal})

    @property
    def ledger_dir(self) -> Path:
        """The folder of the ledger."""
        return (self.capture.rl_buffer_dir or self.run.run_dir).expanduser()

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the shared line."""
        return self.checkpoints_of(SHARED)

    def checkpoints_of(self, line: str) -> Checkpoints:
        return Checkpoints.of_run(line_folder(self.run.folder, line), self.training.keep_checkpoints)

    @property
    def has_capable_llm(self) -> bool:
        """Whether there is a language model that can judge and read wishes. The embedded model is too small.

        An API that costs money per question is asked only if its owner says so (--judge llm).
        """
        if self.engine.takes_text and self.judge.kind != "llm":
            return bool(self.judge.judge_base_url)
        return bool(self.judge.judge_base_url or self.model.teacher_model_name) or not self.embedded

    @property
    def asks_llm(self) -> bool:
        """Whether a language model is among the judges."""
        return self.judge.kind == "llm" or (self.judge.kind == "auto" and self.has_capable_llm)

    @property
    def learns(self) -> bool:
        """Whether the server trains."""
        return (
            not self.engine.takes_text
            and self.capture.capture
            and self.judge.kind != "none"
            and self.training.max_steps > 0
        )

    # All options, flat.

    def value(self, name: str) -> Any:
        """The value of an option, by its name."""
        return next(getattr(section, name) for kind, section in self.sections.items() if name in kind.model_fields)

    def values(self) -> dict[str, Any]:
        """Every option by name, except secrets: for the user's own code."""
        return {name: self.value(name) for name, field in FIELDS.items() if not option_of(field).secret}

    def given(self) -> dict[str, Any]:
        """The options that were given, except secrets."""
        names = {name for section in self.sections.values() for name in section.model_fields_set}
        return {name: value for name, value in self.values().items() if name in names}


def _some(values: Mapping[str, Any], kind: type[Section]) -> dict[str, Any]:
    """The values that belong to a section."""
    return {name: value for name, value in values.items() if name in kind.model_fields}


@dataclass(frozen=True)
class Loaded:
    """A configuration, and the origin of each of its values."""

    config: Config
    origins: dict[str, str]

    def describe(self) -> list[tuple[str, str, str]]:
        """(option, value, origin) of every option, for --dry-run.

        Secrets are hidden. Derived values are shown, and where there is no value, what happens without one.
        """
        config = self.config
        derived = {
            "model_name": config.policy_name,
            "proxy_host": config.server.host,
            "learning_rate": config.training_settings.learning_rate,
            "served_model_name": config.served_name,
            "backend": config.backend,
            "sampler": config.sampler.name,
            "learner": "none: the weights are elsewhere" if config.engine.takes_text else config.learner.name,
        }
        rows = []
        for name, field in FIELDS.items():
            value = config.value(name)
            origin = self.origins[name]
            if name == "api_key":
                value = ", ".join(map(repr, config.server.user_keys)) or None
            elif option_of(field).secret:
                value = "***" if value else None
            elif name in derived and value != derived[name]:
                value = derived[name]
                origin = f"{origin}, resolved"
            is_default = value is None or value == field.default
            words = shown_default(field) if is_default else shown(value)
            rows.append((flag(name), words, origin))
        return rows


def name_sampler(values: dict[str, Any], origins: dict[str, str]) -> None:
    """Elsewhere, --backend names the engine that samples: take it as --sampler, unless that is another one."""
    engine = values.get("backend")
    if engine in SAMPLERS and engine not in backends() and values.get("sampler", engine) in ("auto", engine):
        values["sampler"] = values.pop("backend")
        origins |= {"sampler": origins["backend"], "backend": "default"}


def shown(value: Any) -> str:
    """A value in the words of the docs, without the passwords of its URLs."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return text_without_accounts(str(value))


def load(
    flags: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    only: Callable[[str], bool] = lambda name: True,
) -> Loaded:
    """Resolve every option. `only` selects the options that may come from the file. Raises ConfigError."""
    in_file = read_file(file, FIELDS) if file else {}
    wanted = {name: value for name, value in in_file.items() if only(name)}
    values, origins = read(FIELDS, flags, os.environ if environment is None else environment, wanted, file)
    name_sampler(values, origins)
    origins |= dict.fromkeys(with_preset(values).keys() - values.keys(), f"preset {values.get('preset')}")
    try:
        return Loaded(Config.of(**values), origins)
    except ValidationError as error:
        raise problem(error, FIELDS, origins) from None


def check_values(flags: Mapping[str, Any]) -> None:
    """Refuse an option whose value is wrong, whatever the other options are. Raises ConfigError."""
    values, origins = read(FIELDS, flags, {}, {}, None)
    for kind in SECTIONS:
        try:
            kind(**_some(values, kind))
        except ValidationError as error:
            if error.errors()[0]["loc"]:
                raise problem(error, FIELDS, origins) from None


#: In a run directory.
OPTIONS_FILE = "options.toml"
OPTIONS_HEAD = (
    "# The options of the server that last learned in this run, for openclaw-rl serve --config.\n"
    "# Keys, and names and passwords in URLs, are left out: give these options again.\n"
)
#: These options hold for one start only.
NOT_KEPT = ("run_dir", "resume_from_ckpt", "continue_from")
#: The options that commands about a run read from its directory: those that stay the same in all its servers.
OF_THE_RUN = ("Method", "Model", "Capture")
ALSO_OF_THE_RUN = ("keep_checkpoints", "cache_dir", "preset")
#: The same of a run that is recorded as text.
OF_AN_API = ("sampler", "upstream_url", "upstream_model")


def keep_options(config: Config) -> None:
    """Write the given options into the run directory, without keys and without the passwords of URLs.

    A server that does not learn keeps the file, unless nobody can learn in this run. Raises ConfigError if the file
    cannot be written.
    """
    path = config.run.folder / OPTIONS_FILE
    is_of_text = config.engine.takes_text and config.capture.capture
    if path.exists() and not config.learns and not is_of_text:
        return
    unfinished = path.with_suffix(".part")
    try:
        unfinished.write_text(OPTIONS_HEAD + to_toml(given(config)))
        unfinished.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}). Mend it, or give another --run-dir.") from None


def given(config: Config) -> dict[str, Any]:
    """The options that were given. Files and folders that exist have absolute paths; URLs have no passwords."""
    return {name: _whole(name, value) for name, value in config.given().items() if name not in NOT_KEPT}


def _whole(name: str, value: Any) -> Any:
    if isinstance(value, str) and "://" in value:
        return text_without_accounts(value)
    if not isinstance(value, Path) and not name.endswith(("model_name", "_path", "method")):
        return value
    # A path to the user's own code has the form file.py:name.
    place, colon, rest = str(value).partition(":")
    path = Path(place).expanduser()
    return f"{os.path.abspath(path)}{colon}{rest}" if path.exists() else str(value)


def to_toml(options: Mapping[str, Any]) -> str:
    """Options as the text of a configuration file."""
    return "".join(f"{name.replace('_', '-')} = {_literal(value)}\n" for name, value in options.items())


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # A JSON string is also a TOML string, except that TOML requires this character to be escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def load_for_run(flags: Mapping[str, Any], file: Path | None = None) -> Loaded:
    """The options of a command about a run. Without a configuration file, the options in the run directory are used.

    Raises ConfigError.
    """
    loaded = load(flags, file=file)
    stored = loaded.config.run.folder / OPTIONS_FILE
    if file is not None or not stored.is_file():
        return loaded
    with_api = load(flags, file=stored, only=lambda name: name in OF_AN_API or _is_of_the_run(name))
    return with_api if with_api.config.engine.takes_text else load(flags, file=stored, only=_is_of_the_run)


def _is_of_the_run(name: str) -> bool:
    return name in ALSO_OF_THE_RUN or option_of(FIELDS[name]).group in OF_THE_RUN
