"""Whether a server of one's own is there at all: the SDK would try for minutes to reach one that is gone."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

BEAT_SECONDS = 5.0
#: So many beats in a row have to be missed.
MISSED = 3


class Heartbeat:
    """Feels for a server as long as it runs; one without an address is taken to be there."""

    def __init__(self, base_url: str | None) -> None:
        self.base_url = base_url
        self._gone = asyncio.Event()
        self._feeling: asyncio.Task[None] | None = None

    def start(self) -> None:
        if self.base_url is not None and self._feeling is None:
            self._feeling = asyncio.create_task(self._feel(self.base_url))

    async def stop(self) -> None:
        if self._feeling is not None:
            self._feeling.cancel()
            await asyncio.gather(self._feeling, return_exceptions=True)
            self._feeling = None

    async def during(self, work: Awaitable[T]) -> T:
        """The result of some work, unless the server is gone. Raises ConnectionError."""
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(self._gone.wait())
        try:
            await asyncio.wait([working, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ConnectionError(f"nobody answers at {self.base_url}")
            return working.result()
        finally:
            for task in (working, leaving):
                task.cancel()

    async def _feel(self, base_url: str) -> None:
        missed = 0
        async with httpx.AsyncClient(timeout=BEAT_SECONDS) as client:
            while True:
                missed = 0 if await there(client.get(f"{base_url.rstrip('/')}/api/v1/healthz")) else missed + 1
                self._gone.set() if missed >= MISSED else self._gone.clear()
                await asyncio.sleep(BEAT_SECONDS)


async def there(answer: Coroutine[Any, Any, httpx.Response]) -> bool:
    """Whether there is a server, whatever it answers; one that is too busy to answer is there too."""
    try:
        await answer
    except httpx.ConnectError:
        return False
    except httpx.HTTPError:
        return True
    return True
