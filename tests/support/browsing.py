"""A real browser for tests: what is needed for it, pages that a test writes itself, and the processes that it runs."""

import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from openclaw_rl.envs.base import Outcome
from openclaw_rl.envs.browser.chromium import NAMES, Chromium
from openclaw_rl.envs.browser.gate import SiteReply, SiteRequest
from openclaw_rl.envs.browser.scenes import SITE_ORIGIN, Scene
from openclaw_rl.envs.browser.tab import ChromiumPage
from support.process_stats import PAGE_BYTES

HAS_CHROMIUM = bool(os.environ.get("CHROMIUM") or any(map(shutil.which, NAMES)))
#: The packages of these tests are not among those of `make test`, which is to do the same everywhere.
needs_browser = pytest.mark.skipif(
    "OPENCLAW_RL_BROWSER" not in os.environ or importlib.util.find_spec("playwright") is None or not HAS_CHROMIUM,
    reason="make test-browser runs it, where there is a Chromium: apt install chromium",
)


class WrittenPages(Scene):
    """Pages without a task."""

    async def goal(self, page: ChromiumPage) -> str:
        return ""

    async def over(self, page: ChromiumPage) -> bool:
        return False

    async def outcome(self, page: ChromiumPage) -> Outcome:
        return Outcome(0.0, solved=False)


@contextlib.asynccontextmanager
async def shown(chromium: Chromium, pages: str | dict[str, str]) -> AsyncIterator[ChromiumPage]:
    """A tab with pages that are given as HTML by their path; one page answers for all paths."""

    def answer(request: SiteRequest) -> SiteReply:
        html = pages if isinstance(pages, str) else pages.get(request.path.partition("?")[0], "")
        return SiteReply(f"<!doctype html><meta charset=utf-8>{html}".encode())

    scene = WrittenPages(chromium, f"{SITE_ORIGIN}/", answer, max_steps=1)
    page = await scene.open()
    try:
        yield page
    finally:
        await page.close()
        await scene.close()


@contextlib.asynccontextmanager
async def listener() -> AsyncIterator[tuple[str, list[bytes]]]:
    """Another server on this machine, and what reached it."""
    received: list[bytes] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.read(300))
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nhi")
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}", received
    finally:
        server.close()


@contextlib.asynccontextmanager
async def datagrams() -> AsyncIterator[tuple[list[str], list[bytes]]]:
    """Sockets for UDP on loopback and on this machine's own address, and what reached them."""
    received: list[bytes] = []

    class Receiver(asyncio.DatagramProtocol):
        def datagram_received(self, data: bytes, _: object) -> None:
            received.append(data)

    loop = asyncio.get_running_loop()
    transports = []
    for host in {"127.0.0.1", own_address()}:
        transports.append((await loop.create_datagram_endpoint(Receiver, local_addr=(host, 0)))[0])
    try:
        yield ["{}:{}".format(*transport.get_extra_info("sockname")) for transport in transports], received
    finally:
        for transport in transports:
            transport.close()


def own_address() -> str:
    """This machine's address on its network; that of loopback if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        # Nothing is sent: the kernel only chooses the address.
        probe.connect(("192.0.2.1", 9))
        return str(probe.getsockname()[0])
    return "127.0.0.1"


def processes(root: int | None = None) -> Iterator[tuple[int, str]]:
    """The processes below this one that run, and their commands."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents.setdefault(int(parent), []).append(int(entry.name))
    below = [root or os.getpid()]
    for pid in below:
        below += parents.get(pid, [])
        with contextlib.suppress(OSError):
            yield pid, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")


def browsers() -> list[int]:
    """The browser processes that this process started: not their own helpers."""
    return [pid for pid, command in processes() if "--headless" in command and "--type=" not in command]


def drivers() -> list[int]:
    """The processes that carry Playwright's commands."""
    return [pid for pid, command in processes() if "run-driver" in command]


def memory_mib() -> float:
    """What all processes below this one take together, in MiB."""
    total = 0
    for pid, _ in processes():
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES
    return total / 2**20


def kill(find: Callable[[], list[int]]) -> None:
    """kill -9 for the processes that a function finds."""
    pids = find()
    assert pids, "nothing to kill"
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
