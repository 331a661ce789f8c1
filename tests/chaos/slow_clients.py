"""Clients that send slowly, never finish or never read, more of them than the server has files: others are served."""

import asyncio
import contextlib
import itertools
import json
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from chaos.fuzz import scripted_server
from chaos.report import Report, Setting
from support.process_stats import memory_mib, open_files
from support.raw_http import NoAnswer, RawConnection, request_bytes
from support.server_program import SERVE

#: Slow connections of all kinds together.
CONNECTIONS = 1_200
#: The files that the server's process may have open.
SERVER_FILES = 1_024
#: How long people are served beside the slow clients, at least.
SECONDS = 20
#: How long a request may take to come, in the server's options; and when the server must have closed the connection.
LIMITS = ("--header-seconds", "5", "--body-seconds", "8")
MAX_SECONDS = 60
#: The longest wait for an answer to an ordinary request beside them.
ANSWER_SECONDS = 10
#: Slow clients come from other addresses than people, because the server limits connections by address.
SLOW_ADDRESSES = tuple(f"127.0.0.{number}" for number in range(2, 10))

#: What a slow client's system receives for it before it reads.
RECEIVE_BYTES = 4096
FEW_FILES = ["bash", "-c", f'ulimit -n {SERVER_FILES}; exec "$@"', "bash", *SERVE]

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
QUESTION = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
LONG_ANSWER = json.dumps(
    {"messages": [{"role": "user", "content": "hello"}], "n": 32, "logprobs": True, "top_logprobs": 10, "stream": True}
).encode()


@dataclass(frozen=True)
class Slowness:
    """A kind of slow client: what it sends at once, and what it sends every second."""

    name: str
    first: bytes
    then: bytes = b""
    must_end: bool = True
    """Whether the server has to close the connection although the client stays."""


NEVER_READS = Slowness(
    "never reads", HEAD + b"Content-Length: %d\r\n\r\n" % len(LONG_ANSWER) + LONG_ANSWER, must_end=False
)
KINDS = (
    Slowness("silent", b""),
    Slowness("half a header", HEAD + b"X-Half: "),
    Slowness("slow header", HEAD + b"X-Slow: ", b"a"),
    Slowness("slow header lines", HEAD, b"X-Slow: a\r\n"),
    Slowness("half a body", HEAD + b"Content-Length: 5000\r\n\r\n{"),
    Slowness("slow body", HEAD + b"Content-Length: 5000\r\n\r\n", b" "),
    Slowness("slow chunks", HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    NEVER_READS,
    Slowness("garbage", b"\x00" * 10),
)


@dataclass
class Crowd:
    """The slow clients, and how many of each kind are still connected."""

    port: int
    open: dict[str, int] = field(default_factory=dict)

    async def hold(self, kind: Slowness, address: str) -> None:
        """Be one slow client until the server closes the connection."""
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        client.bind((address, 0))
        client.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", self.port))
        except OSError:
            client.close()
            return
        reader, writer = await asyncio.open_connection(sock=client, limit=RECEIVE_BYTES)
        self.open[kind.name] = self.open.get(kind.name, 0) + 1
        try:
            writer.write(kind.first)
            await (stay(writer, kind) if kind is NEVER_READS else until_closed(reader, writer, kind))
        except OSError:
            pass
        finally:
            self.open[kind.name] -= 1
            writer.transport.abort()


async def stay(writer: asyncio.StreamWriter, kind: Slowness) -> None:
    while True:
        await asyncio.sleep(1)
        writer.write(kind.then)


async def until_closed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kind: Slowness) -> None:
    """Send slowly, and read what comes until the connection is closed."""
    sending = asyncio.create_task(stay(writer, kind))
    try:
        while await reader.read(RECEIVE_BYTES):
            pass
    finally:
        sending.cancel()


def run(report: Report, setting: Setting) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(setting.times(CONNECTIONS, least=18), hard - 200)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count + 200), hard))
    with scripted_server(setting, *LIMITS, command=FEW_FILES) as (program, port):
        pid = program.process.pid
        before, files = memory_mib(pid), open_files(pid)
        asyncio.run(attack(report, port, count, setting.times(SECONDS, least=3), lambda: open_files(pid)))
        report.check(program.process.poll() is None, "the server ended")
        report.memory = (before, memory_mib(pid))
        left = open_files(pid) - files
        report.check(left < 10, "connections stay open after their clients have gone", f"{left} files")
        report.check_log(program.log)


async def attack(report: Report, port: int, count: int, least: int, files: Callable[[], int]) -> None:
    """Hold the connections; people ask meanwhile, until the server has closed all that it must close."""
    crowd = Crowd(port)
    # Long answers are work for the server, so only clients from one address ask for them.
    kinds = ((address, kind) for address in SLOW_ADDRESSES for kind in KINDS)
    places = itertools.cycle(
        [(address, kind) for address, kind in kinds if kind is not NEVER_READS or address == SLOW_ADDRESSES[0]]
    )
    slow = [asyncio.create_task(crowd.hold(kind, address)) for address, kind in itertools.islice(places, count)]
    report.count("slow clients", count)
    started, must_end = time.monotonic(), [kind.name for kind in KINDS if kind.must_end]
    await asyncio.sleep(1)
    while True:
        seconds = time.monotonic() - started
        held = {name: crowd.open.get(name, 0) for name in must_end if crowd.open.get(name)}
        if seconds > MAX_SECONDS or (seconds > least and not held):
            break
        report.most("most open files", files())
        await ask(report, port)
        await asyncio.sleep(0.2)
    report.check(not held, f"slow connections are still open after {MAX_SECONDS} s", str(held))
    report.count("seconds until all were closed", round(seconds))
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    await asyncio.sleep(2)
    await ask(report, port)


async def ask(report: Report, port: int) -> None:
    """An ordinary request on a connection of its own."""
    headers = {"Host": "127.0.0.1", "Content-Length": str(len(QUESTION))}
    connection, started = RawConnection(port), time.monotonic()
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await connection.exchange(request_bytes("POST", "/v1/chat/completions", headers, QUESTION))
        report.check(
            answer.status == 200, "somebody was refused beside slow clients", f"{answer.status} {answer.body!r}"
        )
        report.count("answered")
    except (NoAnswer, TimeoutError) as error:
        report.fail("somebody got no answer beside slow clients", repr(error))
    report.most("slowest answer, ms", round(1000 * (time.monotonic() - started)))
    with contextlib.suppress(OSError):
        await connection.close()
