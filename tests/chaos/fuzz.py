"""Hostile requests by the ten thousand against a server that answers at once."""

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from chaos.mutations import FuzzRequest, fuzz_request
from chaos.report import Report, Setting
from openclaw_rl.ledger.schema import FILE, connect
from support import instant_answers
from support.process_stats import memory_mib
from support.raw_http import NoAnswer, RawAnswer, RawConnection, request_bytes
from support.server_program import SERVE, Program, serving

REQUESTS = 100_000
CONNECTIONS = 12
#: The longest wait for one answer.
ANSWER_SECONDS = 30.0
#: The longest wait for an answer to bytes that are no HTTP request; some look like the beginning of one.
BAD_HTTP_SECONDS = 1.0
#: The longest that /healthz may take beside hostile requests. Generous: the fuzzer takes a core itself.
HEALTH_SECONDS = 2.0
HEALTH_EVERY = 0.25
SLOW_HEALTH = "/healthz was slow"
#: How much memory the server may keep after a number of requests of any kind.
MAX_GROWTH_MIB = 250
#: Memory is measured first when this share of the requests has been sent, because caches fill.
WARM_UP = 0.05

SCRIPTED = ("--custom-generate-function-path", instant_answers.__file__, "--kv-cache-gib", "0.1")
QUIET = ("--judge", "feedback", "--max-steps", "0", "--max-request-mb", "2", "--log-level", "warning")


@contextlib.contextmanager
def scripted_server(setting: Setting, *flags: str, command: list[str] = SERVE) -> Iterator[tuple[Program, int]]:
    """A whole server whose answers take no time, and its port. It records and judges, but does not learn."""
    run_dir = ("--run-dir", str(setting.folder / "run"))
    with serving(command, setting.model, *run_dir, *SCRIPTED, *QUIET, *flags) as program:
        port = urlsplit(program.url).port
        assert port is not None
        yield program, port


def run(report: Report, setting: Setting) -> None:
    with scripted_server(setting) as (program, port):
        asyncio.run(Fuzzer(report, setting, program.process.pid, port).run())
        report.check(program.process.poll() is None, "the server ended")
        report.check_log(program.log)
    report.check(integrity(setting.folder / "run") == "ok", "the ledger is damaged")


def integrity(run_dir: Path) -> str:
    with contextlib.closing(connect(run_dir / FILE, readonly=True)) as db:
        return str(db.execute("PRAGMA integrity_check").fetchone()[0])


class Fuzzer:
    """Sends the requests over several connections and checks each answer."""

    def __init__(self, report: Report, setting: Setting, pid: int, port: int) -> None:
        self.report, self.pid, self.port, self.seed = report, pid, port, setting.seed
        self.total = setting.times(REQUESTS)
        self._numbers = iter(range(self.total))
        self._ids = deque(["chatcmpl-none"], maxlen=50)
        self._text = ""
        self._before = memory_mib(pid)

    async def run(self) -> None:
        self._text = await self.talk()
        watch = asyncio.create_task(self.watch_health())
        await asyncio.gather(*(self.work() for _ in range(CONNECTIONS)))
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        await self.talk()
        after = memory_mib(self.pid)
        self.report.memory = (self._before, after)
        self.report.check(after - self._before < MAX_GROWTH_MIB, f"memory grew by more than {MAX_GROWTH_MIB} MiB")

    async def work(self) -> None:
        connection = RawConnection(self.port)
        for number in self._numbers:
            request = fuzz_request(self.seed, number, self._ids[number % len(self._ids)], self._text)
            await self.send(connection, number, request)
            if number == int(self.total * WARM_UP):
                self._before = memory_mib(self.pid)
        await connection.close()

    async def send(self, connection: RawConnection, number: int, request: FuzzRequest) -> None:
        """Send one request and check its answer."""
        self.report.count("requests")
        where = f"request {number} of seed {self.seed}: {request.wire[:300]!r}"
        if request.bad_http:
            await connection.close()  # what comes after such bytes on the same connection means nothing
        try:
            async with asyncio.timeout(BAD_HTTP_SECONDS if request.bad_http else ANSWER_SECONDS):
                answer = await connection.exchange(request.wire, without_body=request.method == "HEAD")
            self.check(answer, request, where)
        except (NoAnswer, TimeoutError) as error:
            if not request.bad_http:
                self.report.fail("no answer", f"{error!r} to {where}")
        except ValueError as error:
            self.report.fail("the answer cannot be read", f"{error!r} to {where}")
        if request.bad_http:
            await connection.close()

    def check(self, answer: RawAnswer, request: FuzzRequest, where: str) -> None:
        self.report.count(f"{answer.status // 100}xx")
        example = f"{answer.status} {answer.body[-200:]!r} to {where}"
        if answer.status >= 500 or 300 <= answer.status < 400:
            self.report.fail(f"status {answer.status}", example)
        elif request.method == "HEAD":
            return
        elif answer.status >= 400:
            self.report.check(is_openai_error(answer.body), "an error is not in OpenAI's shape", example)
        elif answer.headers.get("content-type", "").startswith("text/event-stream"):
            whole = answer.body.endswith(b"data: [DONE]\n\n") and b'"error"' not in answer.body
            self.report.check(whole, "a stream does not end as it should", example)
        elif request.path.startswith("/v1/chat/completions"):
            self._ids.append(json.loads(answer.body)["id"])

    async def watch_health(self) -> None:
        """Ask for /healthz over new connections, as a supervisor of the server does."""
        request = request_bytes("GET", "/healthz", {"Host": "127.0.0.1"})
        while True:
            started = time.monotonic()
            connection = RawConnection(self.port)
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    status = (await connection.exchange(request)).status
            except (NoAnswer, TimeoutError) as error:
                self.report.fail("/healthz gave no answer", repr(error))
                status = 0
            seconds = time.monotonic() - started
            self.report.most("slowest healthz, ms", round(1000 * seconds))
            self.report.check(status in (0, 200), f"/healthz answered {status}")
            self.report.check(seconds < HEALTH_SECONDS, SLOW_HEALTH, f"{seconds:.1f} s")
            await connection.close()
            await asyncio.sleep(HEALTH_EVERY)

    async def talk(self) -> str:
        """The text of the answer to an ordinary request."""
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
        headers = {"Host": "127.0.0.1", "Content-Length": str(len(body))}
        connection = RawConnection(self.port)
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await connection.exchange(request_bytes("POST", "/v1/chat/completions", headers, body))
        await connection.close()
        served = answer.status == 200
        self.report.check(served, "an ordinary request was not answered", f"{answer.status} {answer.body[:200]!r}")
        return str(answer.json()["choices"][0]["message"]["content"]) if served else ""


def is_openai_error(body: bytes) -> bool:
    """Whether a body is an error in OpenAI's shape."""
    try:
        error = json.loads(body)["error"]
        texts = error["message"], error["type"]
        return all(isinstance(text, str) and text for text in texts) and {"param", "code"} <= error.keys()
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
