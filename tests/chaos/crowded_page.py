"""One user takes all that the live page gives, and odd addresses come with every key: others still see their page."""

import asyncio
import json
import random
import re
import secrets
from dataclasses import dataclass
from urllib.parse import quote, urlencode

from fastapi.routing import APIRoute

from chaos.fuzz import ANSWER_SECONDS, scripted_server
from chaos.report import Report, Setting
from openclaw_rl.api.app import TOPICS
from openclaw_rl.dashboard.live.access import MAX_LOGINS
from openclaw_rl.dashboard.live.reads import MAX_PAGES
from openclaw_rl.dashboard.live.routes import ROUTES
from support.process_stats import memory_mib
from support.raw_http import NoAnswer, RawAnswer, RawConnection, request_bytes

#: Requests with odd values at full size.
REQUESTS = 5_000
#: How often one user logs in at full size; more often than logins are kept at every size.
LOGINS = 1_000
#: Addresses whose answers do not end, or end the login.
EVENTS, LOGOUT = "/dashboard/events", "/dashboard/logout"
ODD = (
    "0",
    "1",
    "-1",
    str(2**63 - 1),
    str(2**63),
    "9" * 18,
    "9" * 19,
    "9" * 5000,
    "1e999",
    "nan",
    "\u0663",
    "\x00",
    "\ud800",
    "..",
    "a:7",
    "x" * 300,
    "x" * 5000,
    "http://[",
    "'; DROP TABLE turns; --",
)
ODD_HEADERS = ("Origin", "Referer", "Host", "Cookie", "Last-Event-ID", "X-Part", "X-Session-Id", "Content-Type")
FIELDS = ("turn", "session", "version", "one", "other", "score", "text", "comparison", "better", "next", "token")
QUERIES = ("before", "after", "since", "only", "pulse")
JSON_FIELDS = (
    "id",
    "choice",
    "score",
    "reward",
    "group_size",
    "version",
    "count",
    "text",
    "seed",
    "n",
    "input",
    "stop",
)
#: As JSON: numbers that are written as such, of any length, and texts.
ODD_JSON = (*(text for text in ODD if text.isascii() and text.isdigit()), *map(json.dumps, ODD), "[]", "{}", "null")
PLACE = re.compile(r"\{[^}]*\}")


@dataclass
class Visitor:
    """Somebody with a key of the server and a login to its page; without either, a stranger."""

    port: int
    secret: str = ""
    cookie: str = ""
    token: str = ""

    async def send(self, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> RawAnswer:
        connection = RawConnection(self.port)
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                own = {"Cookie": self.cookie} if self.cookie else {}
                length = {"Content-Length": str(len(body))}
                request = request_bytes(method, path, {"Host": "127.0.0.1", **own, **headers, **length}, body)
                return await connection.exchange(request, without_body=method == "HEAD")
        finally:
            await connection.close()

    async def log_in(self) -> bool:
        """Log in again; whether the server let them in."""
        answer = await self.send("POST", "/dashboard/login", {}, urlencode({"key": self.secret}).encode())
        self.cookie = answer.headers.get("set-cookie", "").partition(";")[0]
        if answer.status != 303:
            return False
        found = re.search(rb'data-token="(\w+)"', (await self.send("GET", "/dashboard/", {})).body)
        self.token = found[1].decode() if found else ""
        return bool(self.token)

    async def open_page(self, **headers: str) -> tuple[int, asyncio.StreamWriter]:
        """Begin to follow the changes; the status, and the connection, which stays open."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(request_bytes("GET", EVENTS, {"Host": "127.0.0.1", "Cookie": self.cookie, **headers}))
        async with asyncio.timeout(ANSWER_SECONDS):
            return int((await reader.readline()).split()[1]), writer


def run(report: Report, setting: Setting) -> None:
    alice, bob = secrets.token_hex(8), secrets.token_hex(8)
    keys = ("--proxy-host", "127.0.0.1", "--api-key", f"alice={alice},bob={bob}")
    with scripted_server(setting, *keys) as (program, port):
        before = memory_mib(program.process.pid)
        asyncio.run(attack(report, setting, Visitor(port, alice), Visitor(port, bob)))
        report.memory = (before, memory_mib(program.process.pid))
        report.check(program.process.poll() is None, "the server ended")
        report.check_log(program.log)


async def attack(report: Report, setting: Setting, alice: Visitor, bob: Visitor) -> None:
    """Bob takes all places that he can get. Then odd requests come, and Alice looks at her page."""
    report.check(await alice.log_in(), "somebody could not log in")
    for _ in range(max(setting.times(LOGINS), MAX_LOGINS + 10)):
        report.check(await bob.log_in(), "somebody could not log in again")
        report.count("logins")
    opened = [await bob.open_page() for _ in range(MAX_PAGES + 10)]
    report.count("pages of one user", sum(status == 200 for status, _ in opened))
    refused = {status for status, _ in opened[MAX_PAGES:]}
    report.check(refused == {429}, "one user can have any number of pages", str(refused))
    await check_page(report, alice)
    await fuzz(report, setting, (alice, bob, Visitor(alice.port)))
    await check_page(report, alice)
    for _, writer in opened:
        writer.transport.abort()


async def check_page(report: Report, visitor: Visitor) -> None:
    """The visitor's login has not ended, and their page is told of changes."""
    page = await visitor.send("GET", "/dashboard/sessions", {"X-Part": "main"})
    report.check(page.status == 200, "one user's logins ended another's", str(page.status))
    status, writer = await visitor.open_page()
    report.check(status == 200, "one user's pages shut another out", str(status))
    writer.transport.abort()


async def fuzz(report: Report, setting: Setting, visitors: tuple[Visitor, ...]) -> None:
    draw = random.Random(setting.seed)
    api = [route for topic in TOPICS for route in topic.router.routes if isinstance(route, APIRoute)]
    places = [(method, route.path) for route in (*api, *ROUTES) for method in sorted(route.methods or ())]
    for number in range(setting.times(REQUESTS, least=500)):
        visitor, (method, path) = draw.choice(visitors), draw.choice(places)
        where = f"request {number} of seed {setting.seed}: {method} {path}"
        try:
            status = await send_odd(draw, visitor, method, path)
        except (NoAnswer, TimeoutError, ValueError) as error:
            report.fail("no answer", f"{error!r} to {where}")
            continue
        report.count(f"{status // 100}xx")
        report.check(status < 500, f"status {status}", where)


async def send_odd(draw: random.Random, visitor: Visitor, method: str, path: str) -> int:
    """Send a request with odd values in its address, headers and body; the status of its answer."""
    address = PLACE.sub(lambda _: quote(draw.choice(ODD), safe="", errors="surrogatepass"), path)
    if draw.random() < 0.5:
        value = draw.choice((quote(draw.choice(ODD), errors="surrogatepass"), "\ud800", "%ff"))
        address += f"?{draw.choice(QUERIES)}={value}"
    headers = {"Authorization": f"Bearer {visitor.secret}"} if visitor.secret and draw.random() < 0.9 else {}
    if draw.random() < 0.5:
        value = draw.choice(ODD)
        headers[draw.choice(ODD_HEADERS)] = value if value.isascii() and value.isprintable() else "é"
    if path == EVENTS:
        odd = {name: value for name, value in headers.items() if name == "Last-Event-ID"}
        status, writer = await visitor.open_page(**odd)
        writer.transport.abort()
        return status
    if path.startswith("/dashboard"):
        fields = {name: draw.choice(ODD) for name in FIELDS if draw.random() < 0.8}
        if path != LOGOUT and visitor.token:
            fields["token"] = visitor.token
        body = urlencode(fields, errors="surrogatepass").encode()
    else:
        given = [f'"{name}": {draw.choice(ODD_JSON)}' for name in JSON_FIELDS if draw.random() < 0.3]
        body = f"{{{', '.join(given)}}}".encode()
    return (await visitor.send(method, address, headers, body if method in ("POST", "PATCH") else b"")).status
