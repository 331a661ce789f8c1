"""Tells open pages what has changed, as server-sent events."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Hashable
from dataclasses import asdict

from pydantic_core import to_json

from openclaw_rl.dashboard.live.reads import PageThreads
from openclaw_rl.ledger.errors import CaptureSuspended, LedgerUnusable
from openclaw_rl.types import PageChanges

#: The shortest time between two messages to one page.
MIN_INTERVAL_SECONDS = 0.25
#: How often the numbers of the server are looked at while a page shows them; they are in memory, not in the database.
PULSE_SECONDS = 2.0
#: A page that has heard nothing for so long is sent an empty comment, so that proxies keep the connection.
KEEPALIVE_SECONDS = 20.0
#: The most pages that can be open at once.
MAX_PAGES = 100
KEEPALIVE = b": still here\n\n"
PULSE = b"event: pulse\ndata: {}\n\n"


class ChangeFeed:
    """Sends each open page what changed for its owner.

    - The ledger's writer wakes it. Nothing polls the database.
    - A page that reconnects with the number of its last event misses no change.
    - A page gets at most one message every `MIN_INTERVAL_SECONDS`, however much is written.
    - `close` ends all streams, so that the server can stop.
    """

    def __init__(self, threads: PageThreads, pulse: Callable[[], Hashable]) -> None:
        """`pulse` returns the server's numbers; pages that show them are told when they differ."""
        self._threads, self._ledger, self._pulse = threads, threads.ledger, pulse
        self._wakers: set[asyncio.Event] = set()
        self._closed = False

    @property
    def is_full(self) -> bool:
        """Whether no further page can be told of changes."""
        return len(self._wakers) >= MAX_PAGES

    def close(self) -> None:
        """End all streams. To be called on the event loop."""
        self._closed = True
        for waker in self._wakers:
            waker.set()

    async def events(self, owner: str, since: int, *, pulse: bool) -> AsyncIterator[bytes]:
        """The events for one page after a cursor; with `pulse`, also those about the server's numbers."""
        with self._ledger.watch() if self._ledger else contextlib.nullcontext(asyncio.Event()) as changed:
            self._wakers.add(changed)
            try:
                async for event in self._follow(changed, owner, since, pulse):
                    yield event
            finally:
                self._wakers.discard(changed)

    async def _follow(self, changed: asyncio.Event, owner: str, since: int, pulse: bool) -> AsyncIterator[bytes]:
        # At once, so that a proxy passes the headers on.
        yield KEEPALIVE
        changed.set()
        numbers = self._pulse()
        quiet = 0.0
        while not self._closed:
            if changed.is_set() and self._ledger is not None:
                changed.clear()
                changes = await self._changes(since, owner)
                if changes is not None:
                    since = changes.cursor
                    if changes:
                        yield message("change", changes)
                        quiet = 0.0
            if pulse and (now := self._pulse()) != numbers:
                numbers = now
                yield PULSE
                quiet = 0.0
            await asyncio.sleep(MIN_INTERVAL_SECONDS)
            patience = PULSE_SECONDS if pulse else KEEPALIVE_SECONDS
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await changed.wait()
                continue
            quiet += patience
            if quiet >= KEEPALIVE_SECONDS:
                quiet = 0.0
                yield KEEPALIVE

    async def _changes(self, since: int, owner: str) -> PageChanges | None:
        """None if the ledger cannot be read at the moment."""
        try:
            return await self._threads.read(lambda reader: reader.changes_for(since, owner))
        except (CaptureSuspended, LedgerUnusable):
            return None


def message(name: str, changes: PageChanges) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (name.encode(), changes.cursor, to_json(asdict(changes)))
