"""How a worker is started, and what the server needs of one that runs.

A worker is a process on this machine (`link`) or an actor of a Ray cluster (`engines.ray`). Nothing else of sampler and
learner knows how their workers run.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

from openclaw_rl.engines.local.process.learner_messages import LOOPBACK
from openclaw_rl.engines.local.process.link import EXIT_SECONDS, Link


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
    def nodes(self) -> list[str]:
        """The nodes of the cluster that it runs on, as far as they are known; none where there is no cluster."""

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

    @property
    def meeting_host(self) -> str:
        """Where the first of several ranks waits for the others; empty: at the address of its own machine."""

    def start(self, target: str, arguments: object, device: str) -> WorkerLink:
        """Run `main(connection, arguments)` of the module `target` in a new worker that may use `device`.

        `connection` has `send` and `recv` as a pipe has: `recv` raises EOFError when the link is closed. Raises
        OSError if no worker can be started.
        """


class ProcessLauncher:
    """Starts workers as processes on this machine. They choose their device themselves, from their arguments."""

    meeting_host = LOOPBACK

    def __init__(self, spins: int) -> None:
        """`spins`: how often a worker's threads look for each other before they give up their core."""
        self.spins = spins

    def start(self, target: str, arguments: object, device: str) -> WorkerLink:
        return Link(target, arguments, self.spins)


def on_nodes(nodes: Sequence[str]) -> str:
    """The nodes that workers run on, as a phrase that begins with a space; empty where there is no cluster."""
    shown = nodes[:1] if len(set(nodes)) == 1 else nodes
    return f" at {', '.join(shown)}" if shown else ""
