"""Which tasks the environment `terminal` has: generated ones, or those of a folder."""

from collections.abc import Sequence
from typing import Any

from openclaw_rl.envs.base import Environment
from openclaw_rl.envs.terminal.environment import TerminalEnvironment
from openclaw_rl.envs.terminal.episode import TerminalLimits
from openclaw_rl.sandbox.choose import choose_sandbox
from openclaw_rl.sandbox.kinds import DEFAULT_IMAGE


def make_terminal(
    sandbox: str = "auto",
    unsafe_no_sandbox: bool = False,
    image: str = DEFAULT_IMAGE,
    families: str | Sequence[str] | None = None,
    levels: int | Sequence[int] | None = None,
    examples: int | None = None,
    style: str | None = None,
    seconds: float = 10.0,
    max_output: int = 2000,
    memory_mib: int = 512,
) -> Environment:
    """The environment of the given settings. Raises ConfigError."""
    limits = TerminalLimits(seconds, max_output, memory_mib)
    given: dict[str, Any] = {"families": families, "levels": levels, "examples": examples, "style": style}
    settings = {name: value for name, value in given.items() if value is not None}
    return TerminalEnvironment(choose_sandbox(sandbox, unsafe_no_sandbox, image), limits, **settings)
