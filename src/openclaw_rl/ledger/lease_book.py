"""What an outside trainer's server does with the ledger: leases, and the weights that the trainer made."""

import asyncio
import sqlite3
from collections.abc import Callable
from typing import TypeVar

from openclaw_rl.ledger import leases, policies
from openclaw_rl.ledger.note_keeper import Read
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.types import Lease, LeaseEnd

T = TypeVar("T")


class LeaseBook:
    """The leases of a ledger.

    - A turn is in one open lease at most. A group is leased as a whole, once it is settled.
    - A lease that was confirmed is a step that counts, exactly once, however often it is confirmed.
    - A lease that runs out gives its turns back. It cannot be confirmed any more.
    - Leases are on the disk: they hold across a crash of either side.
    """

    def __init__(self, writer: Writer, read: Read) -> None:
        self._writer, self._read = writer, read

    async def claim(self, count: int, max_staleness: int, seconds: float) -> Lease | None:
        """Lease turns; None if there are fewer than `count`."""
        return await self._write(lambda db: leases.claim(db, count, max_staleness, seconds))

    async def confirm(self, id: str, version: int, parent: int) -> int:
        """Record that a lease's turns were trained on, which made policy `version` from `parent`; the step.

        Raises UnknownLease and LeaseRefused.
        """
        return await self._write(lambda db: leases.confirm(db, id, version, parent))

    async def release(self, id: str) -> None:
        """End a lease without a step."""
        await self._write(lambda db: leases.release(db, id))

    async def expire(self) -> int:
        """End the leases that have run out; how many there were."""
        return await self._write(leases.expire) if self._read(leases.any_expired) else 0

    def open(self) -> list[Lease]:
        """The leases that have not ended, the oldest first."""
        return self._read(leases.open_leases)

    def last_end(self) -> LeaseEnd | None:
        """How the newest lease ended; None if it is open or there is none."""
        return self._read(leases.last_end)

    def last_step(self) -> int:
        """The last step that counts."""
        return self._read(leases.last_step)

    def note_weights(self, version: int, parent: int, label: str) -> None:
        """Record weights that inference servers hold. Not awaited: it comes before each change submitted after it."""
        self._writer.submit(lambda db: policies.add(db, version, parent, label))

    def label(self, version: int) -> str:
        """What the inference servers call a version's weights; empty if that is not known."""
        return self._read(lambda db: policies.label(db, version))

    async def _write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.wrap_future(self._writer.submit(change))
