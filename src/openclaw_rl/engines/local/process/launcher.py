"""How a worker of the learner is started, and what the server needs of one that runs.

Today a worker is a process on this machine (`link`). Whoever starts workers in another way writes a `Launcher` and a
`WorkerLink`; nothing else of the learner knows how they run.
"""

from collections.abc import AsyncIterator
from typing import Any, Protocol

from openclaw_rl.engines.local.process.link import EXIT_SECONDS, Link

#: Threads give up their core at once, because serving needs it. On 2 cores that write 4 answers, a step of 1,000 tokens
#: then takes 19 s instead of 74, and the answers are no slower.
SPINS = 0


class WorkerLink(Protocol):
    """A running worker.

    - Commands arrive in the order in which they are sent, and sending never blocks.
    - `reports` ends when the worker is gone, for whatever reason.
    - The worker ends when the link is closed, and when the server's process ends.
    """

    @property
    def pids(self) -> list[int]:
        """Its processes on this machine."""

    @property
    def end(self) -> str:
        """How it ended, in a sentence; empty while it runs, if it ended in order, and if `close` killed it."""

    def send(self, command: Any) -> None: ...

    def reports(self) -> AsyncIterator[Any]:
        """What the worker reports, until it is gone. Called once."""

    def interrupt(self) -> None:
        """Have the worker end its step early (`STOP_SIGNAL`, to a process). Does nothing if it is gone."""

    async def close(self, patience: float = EXIT_SECONDS) -> None:
        """Let the worker exit; after `patience` seconds, kill it. Returns when it is gone."""


class Launcher(Protocol):
    """Starts workers."""

    def start(self, target: str, arguments: object, device: str) -> WorkerLink:
        """Run `main(connection, arguments)` of the module `target` in a new worker that may use `device`.

        `connection` has `send` and `recv` as a pipe has: `recv` raises EOFError when the link is closed. Raises
        OSError if no worker can be started.
        """


class ProcessLauncher:
    """Starts workers as processes on this machine. They choose their device themselves, from their arguments."""

    def start(self, target: str, arguments: object, device: str) -> WorkerLink:
        return Link(target, arguments, SPINS)
