"""Which tasks the environment `toolcall` has: generated ones, or those of a user's own tools."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Environment
from openclaw_rl.envs.toolcall.environment import ToolCallEnvironment
from openclaw_rl.envs.toolcall.own.environment import OwnTools


def make_toolcall(
    tools_config: str | Path | None = None,
    kinds: str | Sequence[str] | None = None,
    levels: int | Sequence[int] | None = None,
    examples: int | None = None,
) -> Environment:
    """The environment of the given settings. Raises ConfigError."""
    given: dict[str, Any] = {"kinds": kinds, "levels": levels, "examples": examples}
    settings = {name: value for name, value in given.items() if value is not None}
    if tools_config is None:
        return ToolCallEnvironment(**settings)
    if settings:
        raise ConfigError(f"{next(iter(settings))} is for generated tasks; with --tools-config, tasks are in a file.")
    return OwnTools(tools_config)
