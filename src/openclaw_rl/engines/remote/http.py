"""HTTP calls to one inference server, and their errors."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic_core import from_json, to_json

from openclaw_rl.client import ApiClient, ServerError, error_message, events
from openclaw_rl.engines.base import EngineError, EngineUnavailable

CONNECT_SECONDS = 5.0
#: Characters of a server's own message that are passed on.
MAX_MESSAGE_LENGTH = 300


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
        self._api = ApiClient(url, key, connect_seconds=CONNECT_SECONDS)
        self._api.check()
        self.url = self._api.url
        """For messages."""

    async def close(self) -> None:
        await self._api.close()

    async def get(self, path: str, seconds: float | None = None) -> Any:
        """The JSON answer to a GET; None if the answer is empty or something else."""
        return await self._call("GET", path, b"", seconds)

    async def post(self, path: str, body: Any) -> Any:
        """The JSON answer to a POST; None if the answer is empty or something else."""
        return await self._call("POST", path, b"" if body is None else to_json(body), None)

    async def stream(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The JSON events of a streamed answer."""
        try:
            async with self._api.stream("POST", path, to_json(body)) as answer:
                async for event in events(answer):
                    if "error" in event:
                        message = error_message(event)[:MAX_MESSAGE_LENGTH]
                        raise InferenceServerGone(f"{self.url} broke off its answer: {message}")
                    yield event
        except ServerError as error:
            raise self._error(error, "broke off its answer") from error

    async def _call(self, method: str, path: str, body: bytes, seconds: float | None) -> Any:
        try:
            answer = await self._api.call(method, path, body, seconds=seconds)
        except ServerError as error:
            raise self._error(error, "does not answer") from error
        try:
            return from_json(answer.content)
        except ValueError:
            return None

    def _error(self, failure: ServerError, what: str) -> EngineError:
        status = failure.status
        message = failure.message[:MAX_MESSAGE_LENGTH]
        if not status:
            return InferenceServerGone(f"{self.url} {what}: {message}.")
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
