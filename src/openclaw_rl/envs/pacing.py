"""Keeps a driver from running far ahead of the server."""

import asyncio
import math
import time
from typing import Protocol

from openclaw_rl.envs.connection import PolicyServer
from openclaw_rl.envs.tally import Tally

#: How many training steps the turns that wait at the server may make before no new group starts.
MAX_BATCHES_AHEAD = 2.0
#: How often to ask the server how far it is.
POLL_SECONDS = 0.25


class RolloutWatcher(Protocol):
    """Is told how a rollout goes."""

    def ended(self, tally: Tally) -> None: ...
    def waiting(self, tally: Tally) -> None: ...


class Pacer:
    """Says when a group may start: while the server has at most two training steps of turns waiting."""

    def __init__(self, server: PolicyServer, tally: Tally, watch: RolloutWatcher, minutes: float | None) -> None:
        self._server, self._tally, self._watch = server, tally, watch
        self._seconds = math.inf if minutes is None else 60 * minutes
        self._asked = -math.inf

    async def may_start(self, *, evaluates: bool) -> bool:
        """Wait until the server keeps up; False if the time is up. An evaluation never waits."""
        while self._tally.seconds <= self._seconds:
            if evaluates or time.monotonic() < self._asked + POLL_SECONDS:
                return True
            state = await self._server.queue()
            if state is not None:
                self._asked = time.monotonic()
                self._tally.version = max(self._tally.version, state.version)
                self._tally.batches_ahead = state.batches
                if state.batches <= MAX_BATCHES_AHEAD:
                    return True
                self._watch.waiting(self._tally)
            await asyncio.sleep(POLL_SECONDS)
        return False
