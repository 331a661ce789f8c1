"""Which tasks the environment `terminal` has: generated ones, those of a folder, or those of AgentBench-OS."""

from collections.abc import Sequence
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Environment
from openclaw_rl.envs.choices import several
from openclaw_rl.envs.terminal.agentbench import AgentBench
from openclaw_rl.envs.terminal.environment import TerminalEnvironment
from openclaw_rl.envs.terminal.episode import TerminalLimits
from openclaw_rl.envs.terminal.own import OwnTerminal
from openclaw_rl.sandbox.kinds import DEFAULT_IMAGE, choose_sandbox

SOURCES = ("generated", "agentbench")


def make_terminal(
    sandbox: str = "auto",
    unsafe_no_sandbox: bool = False,
    image: str = DEFAULT_IMAGE,
    path: str | None = None,
    source: str = "generated",
    families: str | Sequence[str] | None = None,
    levels: int | Sequence[int] | None = None,
    examples: int | None = None,
    style: str | None = None,
    seconds: float = 10.0,
    max_output: int = 2000,
    memory_mib: int = 512,
) -> Environment:
    """The environment of the given settings. Raises ConfigError."""
    given: dict[str, Any] = {"families": families, "levels": levels, "examples": examples, "style": style}
    settings = {name: value for name, value in given.items() if value is not None}
    several("terminal", "source", [source], SOURCES)
    if (path is not None or source != SOURCES[0]) and settings:
        raise ConfigError(
            f"{next(iter(settings))} is for generated tasks; leave out path and source, or {next(iter(settings))}."
        )
    for name, value in (("seconds", seconds), ("max_output", max_output), ("memory_mib", memory_mib)):
        if not isinstance(value, int | float) or not value > 0:
            raise ConfigError(f"{name} of terminal must be a number above 0, not {value}.")
    limits = TerminalLimits(seconds, int(max_output), int(memory_mib))
    chosen = choose_sandbox(sandbox, unsafe_no_sandbox, image)
    if path is not None:
        return OwnTerminal(chosen, limits, path)
    if source == "agentbench":
        return AgentBench(chosen, limits)
    return TerminalEnvironment(chosen, limits, **settings)
