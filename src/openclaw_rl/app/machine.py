"""The options that a demo or an evaluation needs."""

from openclaw_rl.app.config import FIELDS, Config
from openclaw_rl.config.options import flag, option_of
from openclaw_rl.evals.arguments import Machine

#: The groups of the options for where a model runs and how much memory it may use.
ENGINE_GROUPS = ("Engine", "GPUs")
#: The options of the server that are also options of `demo` and `eval`.
TYPED = ("seed", "device", "model_name")


def machine_of(config: Config) -> Machine:
    given = config.given()
    of_engine = [name for name in given if option_of(FIELDS[name]).group in ENGINE_GROUPS or name == "cache_dir"]
    typed = [name for name in TYPED if config.value(name) != FIELDS[name].default]
    return Machine(
        model_name=config.model.model_name,
        seed=config.run.seed,
        sampler=config.sampler,
        policy_name=config.policy_name,
        settings=config.engine_settings,
        flags=_flags(config, of_engine),
        typed=_flags(config, typed),
    )


def _flags(config: Config, names: list[str]) -> tuple[str, ...]:
    return tuple(part for name in names for part in _arguments(flag(name), config.value(name)))


def _arguments(flag: str, value: object) -> tuple[str, ...]:
    if isinstance(value, bool):
        return (flag if value else flag.replace("--", "--no-", 1),)
    return flag, str(value)
