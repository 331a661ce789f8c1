"""HTTP calls to one inference server, and their errors."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic_core import from_json, to_json

from openclaw_rl.engines.base import EngineError, EngineUnavailable
from openclaw_rl.http_client import HttpClient, HttpError, HttpResponse, url_without_account

CONNECT_SECONDS = 5.0
#: Shorter than the time after which the servers close an idle connection (5 s), so that no request meets a closed one.
KEEPALIVE_SECONDS = 3.0
#: Characters of a server's own message that are passed on.
MAX_MESSAGE_LENGTH = 300
#: The longest event. SGLang repeats all tokens in each one, with as many log-probs as were asked for.
MAX_EVENT_BYTES = 64 << 20
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
        self.url = url_without_account(url.rstrip("/"))
        """For messages."""
        self._client = HttpClient(
            url.rstrip("/"),
            {"Authorization": f"Bearer {key}"} if key else {},
            keepalive_seconds=KEEPALIVE_SECONDS,
            connect_seconds=CONNECT_SECONDS,
        )

    async def close(self) -> None:
        await self._client.close()

    async def get(self, path: str, seconds: float | None = None) -> Any:
        """The JSON answer to a GET; None if the answer is empty or something else."""
        return await self._call("GET", path, b"", seconds)

    async def post(self, path: str, body: Any) -> Any:
        """The JSON answer to a POST; None if the answer is empty or something else."""
        return await self._call("POST", path, b"" if body is None else to_json(body), None)

    async def stream(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The JSON events of a streamed answer."""
        try:
            async with self._client.stream("POST", path, to_json(body)) as answer:
                if answer.status_code != 200:
                    await answer.read()
                    raise self._error(answer)
                async for event in events(answer):
                    if "error" in event:
                        raise InferenceServerGone(f"{self.url} broke off its answer: {message_of(event)}")
                    yield event
        except (HttpError, ValueError) as error:
            raise InferenceServerGone(f"{self.url} broke off its answer: {error}.") from error

    async def _call(self, method: str, path: str, body: bytes, seconds: float | None) -> Any:
        try:
            async with asyncio.timeout(seconds):
                answer = await self._client.request(method, path, body)
        except TimeoutError:
            raise InferenceServerGone(f"{self.url} does not answer within {seconds:g} s.") from None
        except HttpError as error:
            raise InferenceServerGone(f"{self.url} does not answer: {error}.") from error
        if not 200 <= answer.status_code < 300:
            raise self._error(answer)
        try:
            return from_json(answer.content)
        except ValueError:
            return None

    def _error(self, answer: HttpResponse) -> EngineError:
        status, target = answer.status_code, answer.headers.get("location")
        if 300 <= status < 400:
            to = f" to {url_without_account(target)[:MAX_MESSAGE_LENGTH]}" if target else ""
            return RequestRefused(status, f"{self.url} redirects ({status}){to}: give the URL of the server itself.")
        try:
            message = message_of(from_json(answer.content))
        except ValueError:
            message = answer.text[:MAX_MESSAGE_LENGTH]
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


async def events(answer: HttpResponse) -> AsyncIterator[Any]:
    """The JSON objects of a stream of server-sent events. Raises ValueError for one that is none, or is too long."""
    unfinished = bytearray()
    async for piece in answer.pieces():
        begun = len(unfinished)
        unfinished += piece
        end = unfinished.rfind(b"\n", begun) + 1
        if len(unfinished) - end > MAX_EVENT_BYTES:
            raise ValueError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        if end:
            lines = bytes(unfinished[:end])
            del unfinished[:end]
            for line in lines.splitlines():
                if line.startswith(DATA) and (data := line[len(DATA) :].strip()) != DONE:
                    yield from_json(data)


def message_of(answer: Any) -> str:
    """The message of an error answer, in the forms that servers use."""
    while isinstance(answer, dict):
        answer = next((answer[name] for name in ("error", "message", "detail") if name in answer), str(answer))
    return str(answer)[:MAX_MESSAGE_LENGTH]
