"""Reads the ledger and renders pages in a few threads, so that no page holds up a request."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from openclaw_rl.ledger.errors import NoLedger
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.ledger.reader import LedgerReader

T = TypeVar("T")

#: Pages that are made at the same time.
THREADS = 2


class PageThreads:
    """The threads of one server's pages."""

    def __init__(self, ledger: Ledger | None) -> None:
        self.ledger = ledger
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="dashboard")

    async def run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def read(self, query: Callable[[LedgerReader], T]) -> T:
        """Run a query in a thread. Raises LedgerUnusable, also on a server that records nothing."""
        return await self.run(lambda: query(self.reader()))

    def reader(self) -> LedgerReader:
        """The read model, for the calling thread. Raises NoLedger on a server that records nothing."""
        if self.ledger is None:
            raise NoLedger("This server records nothing (--no-capture), so there is nothing to see here.")
        return self.ledger.reader()
