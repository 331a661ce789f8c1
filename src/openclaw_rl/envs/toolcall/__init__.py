"""The environment `toolcall`: tasks that are solved by calling tools."""

from openclaw_rl.envs.toolcall.environment import ToolCallEnvironment

__all__ = ["ToolCallEnvironment"]
