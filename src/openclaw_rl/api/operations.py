"""What the API can ask of the loops beside it, which it does not know."""

from typing import Protocol

from openclaw_rl.types import NextStep


class Operations(Protocol):
    """Judging and learning, as the server has put them together."""

    def judge(self) -> str:
        """How judging goes: on, off, or suspended and why."""

    def learner(self) -> str:
        """What the next training step waits for, in words."""

    def next_step(self) -> NextStep | None:
        """The same in numbers; None if there will be none."""

    async def roll_back(self, version: int | None) -> int:
        """Serve an earlier policy from now on; its new version. Raises OperationFailed."""


class OperationFailed(Exception):
    """What was asked for cannot be done; the message says why."""


class NoOperations:
    """A server that serves and collects only."""

    def judge(self) -> str:
        return "off"

    def learner(self) -> str:
        return "off"

    def next_step(self) -> NextStep | None:
        return None

    async def roll_back(self, version: int | None) -> int:
        raise OperationFailed("This server does not learn, so there is nothing to roll back.")
