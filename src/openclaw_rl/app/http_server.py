"""The HTTP server: its socket, its event loop, and how it stops."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator
from types import FrameType

import uvicorn

from openclaw_rl.aio import wait_at_most
from openclaw_rl.engines.base import Sampler
from openclaw_rl.errors import UserError

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """Stops at Ctrl-C and SIGTERM, with exit status 0.

    - Running requests have `patience` seconds to finish, or until a second Ctrl-C.
    - Requests that have not finished by then get the error that the server is stopping.
    - A third Ctrl-C stops the server at once.
    """

    def __init__(
        self, config: uvicorn.Config, sampler: Sampler, patience: float, on_stop: Callable[[], None] | None = None
    ) -> None:
        """`on_stop` is called first when the server stops: it ends streams that would never end by themselves."""
        super().__init__(config)
        self.sampler = sampler
        self.patience = patience
        self.on_stop = on_stop
        self._hurried = asyncio.Event()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self.on_stop is not None:
            self.on_stop()
        hurry = asyncio.create_task(self._close_sampler_later())
        await super().shutdown(sockets)
        hurry.cancel()

    async def _close_sampler_later(self) -> None:
        await wait_at_most(self.patience, self._hurried.wait())
        await self.sampler.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()

        def stop(number: int, frame: FrameType | None) -> None:
            if self.should_exit and not self._hurried.is_set():
                loop.call_soon_threadsafe(self._hurried.set)
                return
            if not self.should_exit:
                log.info("Stopping: running requests may finish. Press Ctrl-C again to stop at once.")
            self.handle_exit(number, frame)

        before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def bind(host: str, port: int) -> socket.socket:
    """Take the address, before anything slow is started. Raises UserError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Other processes can take the address until the socket listens.
        listener.listen()
    except OSError as error:
        listener.close()
        raise UserError(
            f"Cannot listen on {host}:{port}: {error.strerror}. "
            "Stop the program that uses it, or choose another --proxy-port."
        ) from None
    return listener


def event_loop() -> asyncio.AbstractEventLoop:
    """A uvloop event loop where uvloop is installed: it halves the overhead of a request."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
