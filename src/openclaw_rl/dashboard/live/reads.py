"""What open pages read: the ledger, in threads so that no page holds up a request, and a feed of changes."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import asdict
from sqlite3 import Connection
from typing import ParamSpec, TypeVar

from pydantic_core import to_json

from openclaw_rl.aio import wait_at_most
from openclaw_rl.ledger.errors import CaptureSuspended, LedgerUnusable, NoLedger
from openclaw_rl.ledger.pages import changes_for
from openclaw_rl.ledger.store import Ledger, Query
from openclaw_rl.types import PageChanges

T = TypeVar("T")
P = ParamSpec("P")

#: Pages that are made at the same time.
THREADS = 2
#: A page that has heard nothing for so long is sent an empty comment, so that proxies keep the connection.
KEEPALIVE_SECONDS = 20.0
#: How often the server's numbers are looked at, and the least time between two messages to a page.
PULSE_SECONDS, MIN_INTERVAL = 2.0, 0.25
#: The most pages that one owner can have open at once.
MAX_PAGES = 100
KEEPALIVE = b": still here\n\n"
PULSE = b"event: pulse\ndata: {}\n\n"


class PageThreads:
    """The threads of one server's pages."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.ledger = ledger
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dashboard")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def read(self, query: Query[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a query in a thread. Raises LedgerUnusable, also on a server that records nothing."""

        def read() -> T:
            with self.snapshot() as db:
                return query(db, *args, **kwargs)

        return await self.run(read)

    def snapshot(self) -> AbstractContextManager[Connection]:
        """One moment of the ledger, for the calling thread. Raises NoLedger on a server that records nothing."""
        if self.ledger is None:
            raise NoLedger("This server records nothing (--no-capture), so there is nothing to see here.")
        return self.ledger.snapshot()


class ChangeFeed:
    """Sends each open page what changed for its owner.

    - The ledger's writer wakes it. Nothing polls the database.
    - A page that reconnects with the number of its last event misses no change.
    - A page gets at most one message every `MIN_INTERVAL` seconds, however much is written.
    - `close` ends all streams, so that the server can stop.
    """

    def __init__(self, threads: PageThreads, pulse: Callable[[], Hashable]) -> None:
        """`pulse` returns the server's numbers, which are in memory: pages that show them are told when they differ."""
        self._threads = threads
        self._ledger = threads.ledger
        self._pulse = pulse
        self._wakers: dict[asyncio.Event, str] = {}
        self._closed = False

    def is_full(self, owner: str) -> bool:
        """Whether no further page of an owner can be told of changes."""
        return sum(other == owner for other in self._wakers.values()) >= MAX_PAGES

    def close(self) -> None:
        """End all streams. To be called on the event loop."""
        self._closed = True
        for waker in self._wakers:
            waker.set()

    async def events(self, owner: str, since: int, *, pulse: bool) -> AsyncIterator[bytes]:
        """The events for one page after a cursor; with `pulse`, also those about the server's numbers."""
        with self._ledger.watch() if self._ledger else contextlib.nullcontext(asyncio.Event()) as changed:
            self._wakers[changed] = owner
            try:
                async for event in self._follow(changed, owner, since, pulse):
                    yield event
            finally:
                del self._wakers[changed]

    async def _follow(self, changed: asyncio.Event, owner: str, since: int, pulse: bool) -> AsyncIterator[bytes]:
        # At once, so that a proxy passes the headers on.
        yield KEEPALIVE
        numbers = self._pulse()
        last_sent = time.monotonic()
        changed.set()
        while not self._closed:
            events: list[bytes] = []
            if changed.is_set():
                changed.clear()
                changes = await self._changes(since, owner)
                since = changes.cursor
                events += [message("change", changes)] if changes else []
            if pulse and (now := self._pulse()) != numbers:
                numbers = now
                events.append(PULSE)
            if not events and time.monotonic() - last_sent >= KEEPALIVE_SECONDS:
                events.append(KEEPALIVE)
            for event in events:
                yield event
                last_sent = time.monotonic()
            await asyncio.sleep(MIN_INTERVAL)
            await wait_at_most(PULSE_SECONDS if pulse else KEEPALIVE_SECONDS, changed.wait())

    async def _changes(self, since: int, owner: str) -> PageChanges:
        """What changed; nothing if the ledger cannot be read at the moment: the next change is read with it."""
        try:
            return await self._threads.read(changes_for, since, owner)
        except (CaptureSuspended, LedgerUnusable):
            return PageChanges(since)


def message(name: str, changes: PageChanges) -> bytes:
    return b"event: %s\nid: %d\ndata: %s\n\n" % (name.encode(), changes.cursor, to_json(asdict(changes)))
