"""Where episodes come from: an environment that follows our protocol, or one of the verifiers package."""

from collections.abc import Mapping
from typing import Any, Protocol

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.connection import PolicyServer
from openclaw_rl.envs.driver import Driver, EpisodeDriver, RolloutPlan, RolloutWatcher
from openclaw_rl.envs.host import EnvironmentHost
from openclaw_rl.envs.options import DriverOptions
from openclaw_rl.envs.registry import make_environment
from openclaw_rl.envs.verifiers.driver import VerifiersDriver
from openclaw_rl.envs.verifiers.process import find_python

VERIFIERS = "verifiers:"


class EpisodeSource(Protocol):
    """Makes drivers, and is closed at the end."""

    about: str
    """What a user should know about the environment before it runs, such as its sandbox; may be empty."""

    def driver(self, server: PolicyServer, plan: RolloutPlan, watch: RolloutWatcher) -> EpisodeDriver: ...
    async def close(self) -> None: ...


class OwnSource:
    """An environment that follows our protocol."""

    def __init__(self, host: EnvironmentHost) -> None:
        self.host = host
        self.about = str(getattr(host.environment, "about", ""))

    def driver(self, server: PolicyServer, plan: RolloutPlan, watch: RolloutWatcher) -> EpisodeDriver:
        return Driver(self.host, server, plan, watch)

    async def close(self) -> None:
        await self.host.close()


class VerifiersSource:
    """An environment of the verifiers package."""

    def __init__(self, name: str, python: str) -> None:
        self.name, self.python, self.about = name, python, ""

    def driver(self, server: PolicyServer, plan: RolloutPlan, watch: RolloutWatcher) -> EpisodeDriver:
        return VerifiersDriver(self.name, self.python, server, plan, watch)

    async def close(self) -> None:
        """Each driver ends its own process."""


def make_source(options: DriverOptions, settings: Mapping[str, Any], *, measures: bool) -> EpisodeSource:
    """The source that --env names. Raises ConfigError and UserError."""
    if not options.env.startswith(VERIFIERS):
        return OwnSource(EnvironmentHost(make_environment(options.env, settings)))
    if settings:
        raise ConfigError("--env-arg and --tools-config are for our own environments; verifiers: takes no settings.")
    if measures:
        raise ConfigError("--measure needs held-out tasks, and environments of verifiers have no splits.")
    return VerifiersSource(options.env.removeprefix(VERIFIERS), find_python(options.verifiers_python))
