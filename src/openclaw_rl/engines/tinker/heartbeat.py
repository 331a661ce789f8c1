"""Notices that a self-hosted server is gone: the SDK would try for minutes to reach it."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

import httpx

from openclaw_rl.http_client import url_without_account

T = TypeVar("T")

BEAT_SECONDS = 5.0
#: Beats in a row after which the server counts as gone.
MAX_MISSED_BEATS = 3


class Heartbeat:
    """Asks a server for its health at intervals; without an address the server is taken to be there."""

    def __init__(self, base_url: str | None) -> None:
        self.base_url = base_url
        self._gone = asyncio.Event()
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.base_url is not None and self._beating is None:
            self._beating = asyncio.create_task(self._beat(self.base_url))

    async def stop(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            await asyncio.gather(self._beating, return_exceptions=True)
            self._beating = None

    async def during(self, work: Awaitable[T]) -> T:
        """The result of some work. Raises ConnectionError if the server is gone before it is done."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ConnectionError(f"no server answers at {url_without_account(self.base_url or '')}")
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()

    async def _beat(self, base_url: str) -> None:
        missed = 0
        async with httpx.AsyncClient(timeout=BEAT_SECONDS) as client:
            while True:
                missed = 0 if await answers(client.get(f"{base_url.rstrip('/')}/api/v1/healthz")) else missed + 1
                self._gone.set() if missed >= MAX_MISSED_BEATS else self._gone.clear()
                await asyncio.sleep(BEAT_SECONDS)


async def answers(call: Coroutine[Any, Any, httpx.Response]) -> bool:
    """Whether a server is there. Any answer counts, and a server that is too busy to answer is there too."""
    try:
        await call
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        pass
    return True
