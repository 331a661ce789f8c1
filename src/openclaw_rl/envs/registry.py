"""From the name of an environment to its episodes: of our protocol, or of the verifiers package."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Environment
from openclaw_rl.envs.driver import Driver, MakeDriver
from openclaw_rl.envs.host import EnvironmentHost
from openclaw_rl.envs.options import DriverOptions
from openclaw_rl.envs.verifiers.driver import VerifiersDriver
from openclaw_rl.envs.verifiers.process import find_python
from openclaw_rl.plugins import describe, load_plugin

OPTION = "--env"
#: The built-in environments: name, module and class. To add one, write its module and add a line here.
BUILT_IN = {
    "toolcall": "openclaw_rl.envs.toolcall.environment:make_toolcall",
    "terminal": "openclaw_rl.envs.terminal.environment:make_terminal",
    "bfcl": "openclaw_rl.envs.bfcl:Bfcl",
    "browser": "openclaw_rl.envs.browser.environment:make_browser",
    "gui": "openclaw_rl.envs.browser.environment:make_browser",
    "swe": "openclaw_rl.envs.swe.environment:make_swe",
}
#: What a name begins with that is an environment of the verifiers package.
VERIFIERS = "verifiers:"
#: What a user's file may call its environment, where the option names none.
DEFAULT_NAMES = ("ENVIRONMENT", "Env", "environment")


def make_environment(name: str, settings: Mapping[str, Any] | None = None) -> Environment:
    """The environment of a built-in name, or of path/file.py:Name. Raises ConfigError.

    A class or a function is called with `settings` as keyword arguments. Anything else is the environment itself.
    """
    settings = settings or {}
    if name not in BUILT_IN and not name.endswith(".py") and ":" not in name:
        known = ", ".join(BUILT_IN)
        raise ConfigError(f"There is no environment {name!r}: use one of {known}, or path/file.py:Name for your own.")
    made = load_plugin(BUILT_IN.get(name, name), OPTION, DEFAULT_NAMES)
    if callable(made):
        check_settings(made, name, settings)
        try:
            made = made(**settings)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(f"{OPTION} {name} cannot be made: {describe(error)}.") from error
    elif settings:
        raise ConfigError(f"{OPTION} {name} takes no settings: {', '.join(settings)}.")
    missing = [method for method in ("tasks", "open") if not callable(getattr(made, method, None))]
    if missing:
        raise ConfigError(f"{OPTION} {name} is not an environment: it has no {' and no '.join(missing)}.")
    environment: Environment = made
    return environment


def check_settings(factory: Any, name: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings that the environment does not take."""
    parameters = inspect.signature(factory).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    if unknown := [setting for setting in settings if setting not in parameters]:
        takes = ", ".join(parameters) or "no settings"
        raise ConfigError(f"{OPTION} {name} does not take {unknown[0]}; it takes {takes}.")


@dataclass(frozen=True, slots=True)
class EpisodeSource:
    """Makes drivers, and is closed at the end."""

    driver: MakeDriver
    about: str = ""
    """What a user should know about the environment before it runs, such as its sandbox; may be empty."""
    host: EnvironmentHost | None = None
    """Runs an environment that follows our protocol. A driver of verifiers ends its own process."""

    async def close(self) -> None:
        if self.host is not None:
            await self.host.close()


def make_source(options: DriverOptions, settings: Mapping[str, Any], *, measures: bool) -> EpisodeSource:
    """The source that --env names. Raises ConfigError and UserError."""
    if not options.env.startswith(VERIFIERS):
        host = EnvironmentHost(make_environment(options.env, settings))
        return EpisodeSource(partial(Driver, host), str(getattr(host.environment, "about", "")), host)
    if settings:
        raise ConfigError("--env-arg and --tools-config are for our own environments; verifiers: takes no settings.")
    if measures:
        raise ConfigError("--measure needs held-out tasks, and environments of verifiers have no splits.")
    python = find_python(options.verifiers_python)
    return EpisodeSource(partial(VerifiersDriver, options.env.removeprefix(VERIFIERS), python))
