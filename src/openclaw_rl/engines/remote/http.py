"""HTTP calls to one inference server, and their errors."""

import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx

from openclaw_rl.engines.base import EngineError, EngineUnavailable

CONNECT_SECONDS = 5.0
#: Shorter than the time after which the servers close an idle connection (5 s), so that no request meets a closed one.
KEEPALIVE_SECONDS = 3.0
#: Characters of a server's own message that are passed on.
MAX_MESSAGE_LENGTH = 300
DATA, DONE = b"data: ", b"[DONE]"


class InferenceServerGone(EngineUnavailable):
    """The server cannot be reached, broke off, or failed inside."""


class RequestRefused(EngineError):
    """The server understood the request and refuses it."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class InferenceServer:
    """One server at a URL. Calls raise InferenceServerGone and RequestRefused.

    * There is no time-out for answers: sampling may take minutes. Whoever calls watches whether the server is alive.
    * Ending a stream early closes its connection, by which the server knows that nobody waits.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/")
        self._client = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64, keepalive_expiry=KEEPALIVE_SECONDS),
            trust_env=False,
        )

    async def close(self) -> None:
        await self._client.aclose()

    async def get(self, path: str, seconds: float | None = None) -> Any:
        """The JSON answer to a GET; None if the answer is empty or something else."""
        timeout = httpx.Timeout(seconds) if seconds is not None else httpx.USE_CLIENT_DEFAULT
        return await self._call("GET", path, None, timeout)

    async def post(self, path: str, body: Any) -> Any:
        """The JSON answer to a POST; None if the answer is empty or something else."""
        return await self._call("POST", path, body, httpx.USE_CLIENT_DEFAULT)

    async def stream(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The JSON events of a streamed answer."""
        try:
            async with self._client.stream("POST", path, json=body) as answer:
                if answer.status_code != 200:
                    raise self._error(answer.status_code, await answer.aread())
                async for event in events(answer):
                    if "error" in event:
                        raise InferenceServerGone(f"{self.url} broke off its answer: {message_of(event)}")
                    yield event
        except (httpx.HTTPError, ValueError) as error:
            raise InferenceServerGone(f"{self.url} broke off its answer: {error!r}.") from error

    async def _call(self, method: str, path: str, body: Any, timeout: Any) -> Any:
        try:
            answer = await self._client.request(method, path, json=body, timeout=timeout)
        except httpx.HTTPError as error:
            raise InferenceServerGone(f"{self.url} does not answer: {error!r}.") from error
        if answer.status_code >= 400:
            raise self._error(answer.status_code, answer.content)
        try:
            return answer.json()
        except ValueError:
            return None

    def _error(self, status: int, body: bytes) -> EngineError:
        try:
            message = message_of(json.loads(body))
        except ValueError:
            message = body.decode(errors="replace")[:MAX_MESSAGE_LENGTH]
        if status >= 500:
            return InferenceServerGone(f"{self.url} failed with {status}: {message}")
        return RequestRefused(status, f"{self.url} answered {status}: {message}")


@contextlib.contextmanager
def readable_answers(url: str) -> Iterator[None]:
    """Raise EngineUnavailable for an answer that has another form than a dialect expects."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise EngineUnavailable(
            f"{url} answers in a form that this program does not know ({error!r}): is it the right kind of server?"
        ) from error


async def events(answer: httpx.Response) -> AsyncIterator[Any]:
    """The JSON objects of a stream of server-sent events."""
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(DATA) and (data := line[len(DATA) :].strip()) != DONE:
                yield json.loads(data)


def message_of(answer: Any) -> str:
    """The message of an error answer, in the forms that servers use."""
    while isinstance(answer, dict):
        answer = next((answer[name] for name in ("error", "message", "detail") if name in answer), str(answer))
    return str(answer)[:MAX_MESSAGE_LENGTH]
