"""Reads the ledger and renders pages in a few threads, so that no page holds up a request."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from sqlite3 import Connection
from typing import ParamSpec, TypeVar

from openclaw_rl.ledger.errors import NoLedger
from openclaw_rl.ledger.store import Ledger, Query

T = TypeVar("T")
P = ParamSpec("P")

#: Pages that are made at the same time.
THREADS = 2


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
