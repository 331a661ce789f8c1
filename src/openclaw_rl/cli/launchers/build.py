"""From a script, the environment and flags to the commands that it runs."""

import argparse
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openclaw_rl.api.options import ServerOptions
from openclaw_rl.app.config import FIELDS
from openclaw_rl.cli.launchers.scripts import LORA_RANK, Runs, Script
from openclaw_rl.cli.launchers.variables import FLAGS, VARIABLES, options_from, published_checkpoint
from openclaw_rl.cli.parser import Parser, add_config_flag
from openclaw_rl.cli.rollout import SERVER_OPTIONS
from openclaw_rl.config.options import ConfigError, add_flags, flag, option_of, read
from openclaw_rl.engines.factory import sampler_factory
from openclaw_rl.engines.registry import SAMPLERS
from openclaw_rl.envs.options import FIELDS as DRIVER_FIELDS

#: Variables with flags, in the order in which they are read. Flags after the script come last.
FLAG_VARIABLES = ("CKPT_ARGS", "ROLLOUT_ARGS", "OPTIMIZER_ARGS", "LORA_ARGS")
YES = ("1", "true", "yes", "on")


@dataclass(frozen=True, slots=True)
class Launch:
    """The commands of a script, without the program's name; the last one is what it is for."""

    commands: list[list[str]]
    environment: dict[str, str]
    dry_run: bool


def build(script: Script, flags: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """The commands that a script runs. Raises ConfigError."""
    changed = changed_environment(environment, script.runs)
    if script.runs is Runs.EVALUATION:
        return build_evaluation(flags, changed)
    given = parse(script, flags, changed)
    options = {**defaults(script, changed), **options_from(environment, script.runs), **given.options}
    if given.namespace.use_lora and options.get("lora_rank", LORA_RANK) == "0":
        options["lora_rank"] = LORA_RANK
    if script.needs_model and not options.get("model_name") and not changed.get("MODEL_NAME"):
        raise ConfigError("MODEL_PATH is not set: there is no Qwen3 of 7B, so give a folder, or Qwen/Qwen3-8B.")
    add_memory_share(options, changed)
    further = ["--config", str(given.namespace.config)] if given.namespace.config else []
    if script.runs is Runs.EPISODES:
        commands = [rollout_command(options, changed, further)]
    else:
        commands = server_commands(options, changed, further)
    return Launch(commands, changed, given.namespace.dry_run)


@dataclass(frozen=True, slots=True)
class Given:
    """The flags of a script, read."""

    namespace: argparse.Namespace
    options: dict[str, Any]
    """By name."""


def parse(script: Script, flags: Sequence[str], environment: Mapping[str, str]) -> Given:
    """Read the flags in variables and those after the script; later ones win. Raises ConfigError."""
    parser = Parser(prog=f"{script.name}.sh", allow_abbrev=False)
    fields = {**FIELDS, **(DRIVER_FIELDS if script.runs is Runs.EPISODES else {})}
    add_flags(parser, fields)
    add_config_flag(parser)
    for theirs, ours in FLAGS.items():
        parser.add_argument(theirs, dest=ours, default=argparse.SUPPRESS, help=f"the same as {flag(ours)}")
    parser.add_argument("--use-lora", action="store_true", help="train an adapter")
    parser.add_argument("--dry-run", action="store_true", help="check and show what would run")
    words: list[str] = []
    for variable in FLAG_VARIABLES:
        try:
            words += shlex.split(environment.get(variable, ""))
        except ValueError as error:
            raise ConfigError(f"{variable} cannot be read: {error}.") from None
    namespace = parser.parse_args([*words, *flags])
    options = {name: value for name, value in vars(namespace).items() if name in fields}
    if "resume_from_ckpt" in options:
        options["resume_from_ckpt"] = published_checkpoint(options["resume_from_ckpt"])
    if "group_size" in options and script.runs is Runs.EPISODES:
        options["group"] = options.pop("group_size")
    return Given(namespace, options)


def changed_environment(environment: Mapping[str, str], runs: Runs) -> dict[str, str]:
    """The environment of the commands: variables that mean something else there are taken out."""
    changed = dict(environment)
    if key := environment.get("WANDB_KEY"):
        changed.setdefault("WANDB_API_KEY", key)
    if (environment.get("USE_WANDB") or "1").lower() not in YES:
        changed.pop("WANDB_PROJECT", None)
    if runs is Runs.EPISODES:
        # There it counts the turns of an episode, and in a server the steps of training.
        changed.pop("MAX_STEPS", None)
    return changed


def defaults(script: Script, environment: Mapping[str, str]) -> dict[str, str]:
    """The script's own options, except where a variable of the option says otherwise. Raises ConfigError."""
    fields = {**FIELDS, **DRIVER_FIELDS}
    if script.runs is Runs.EPISODES and environment.get("ENV_TYPE", script.defaults["env"]) != script.defaults["env"]:
        raise ConfigError(
            f"ENV_TYPE is {environment['ENV_TYPE']}, and {script.name}.sh is for {script.defaults['env']}: use "
            f"run_{environment['ENV_TYPE']}_rl.sh, or unset it."
        )
    return {
        name: value
        for name, value in script.defaults.items()
        if name == "env" or not any(environment.get(variable) for variable in option_of(fields[name]).env)
    }


def add_memory_share(options: dict[str, Any], environment: Mapping[str, str]) -> None:
    """MEM_FRACTION_STATIC as an argument of the sampler's server. Raises ConfigError."""
    share = environment.get("MEM_FRACTION_STATIC")
    if not share:
        return
    named = (options.get("sampler"), options.get("backend"), environment.get("SAMPLER"), environment.get("BACKEND"))
    sampler = next((name for name in named if name in SAMPLERS), "")
    setting = sampler_factory(sampler).memory_share if sampler else None
    if setting is None:
        raise ConfigError("MEM_FRACTION_STATIC is for --sampler vllm or sglang: unset it, or choose one of them.")
    option, argument = setting
    earlier = options.get(option) or environment.get(option.upper(), "")
    options[option] = f"{earlier} {argument} {share}".strip()


def server_commands(options: Mapping[str, Any], environment: Mapping[str, str], further: list[str]) -> list[list[str]]:
    """Train on DATA_PATH if it is given, then serve. Raises ConfigError."""
    serve = ["serve", *further, *as_flags(options)]
    data = environment.get("DATA_PATH")
    only = (environment.get("TRAIN_ONLY") or "0").lower() in YES
    if not data:
        if only:
            raise ConfigError("TRAIN_ONLY needs DATA_PATH: there is nothing to train on.")
        return [serve]
    of_training = {name: value for name, value in options.items() if name not in ServerOptions.model_fields}
    train = ["train", *data_files(Path(data).expanduser()), *further, *as_flags(of_training)]
    return [train] if only else [train, serve]


def data_files(path: Path) -> list[str]:
    """The trajectories that DATA_PATH names: a file, or the .jsonl files of a folder. Raises ConfigError."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise ConfigError(f"DATA_PATH: there is no file {path}, and no folder with .jsonl files.")
    return list(map(str, files))


def rollout_command(options: Mapping[str, Any], environment: Mapping[str, str], further: list[str]) -> list[str]:
    """Run episodes with a server that learns from them. The server reads no variables, so its options are flags."""
    values, _origins = read(FIELDS, {n: v for n, v in options.items() if n in FIELDS}, environment, {}, None)
    own = {name: value for name, value in options.items() if name in DRIVER_FIELDS}
    own |= {name: value for name, value in values.items() if name in SERVER_OPTIONS}
    of_server = {n: v for n, v in values.items() if n not in own and n not in ServerOptions.model_fields}
    command = ["rollout", "--own-server", *further, *as_flags(own)]
    return [*command, "--", *as_flags(of_server)] if of_server else command


def build_evaluation(flags: Sequence[str], environment: Mapping[str, str]) -> Launch:
    """`openclaw-rl eval` with the flags as they are; --model-path may be a name of the documents."""
    words = [word for word in flags if word != "--dry-run"]
    for place, word in enumerate(words):
        if place and words[place - 1] in ("--model-path", "--compare"):
            words[place] = published_checkpoint(word)
    options = as_flags(options_from(environment, Runs.EVALUATION))
    return Launch([["eval", *options, *words]], dict(environment), "--dry-run" in flags)


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Options by name as flags."""
    fields = {**FIELDS, **DRIVER_FIELDS}
    words: list[str] = []
    for name, value in options.items():
        if fields[name].annotation is bool:
            is_on = value if isinstance(value, bool) else str(value).lower() in YES
            words.append(flag(name) if is_on else flag(name).replace("--", "--no-", 1))
            continue
        for one in value if isinstance(value, list) else [value]:
            words += [flag(name), str(one)] if not str(one).startswith("-") else [f"{flag(name)}={one}"]
    return words


def unread(environment: Mapping[str, str], runs: Runs) -> list[str]:
    """The variables of other scripts that are set and have no effect in this one."""
    return [v.name for v in VARIABLES if environment.get(v.name) and runs not in v.scripts]
