"""The client of OpenAI-compatible servers: requests, retries, and the one error that they raise."""

import asyncio
import contextlib
import json
import math
import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Container, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import cached_property, partial
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar
from urllib.parse import quote

from pydantic_core import from_json

from openclaw_rl.errors import UserError
from openclaw_rl.http_client import ConnectFailed, HttpClient, HttpError, HttpResponse, url_without_account
from openclaw_rl.types import SHARED

T = TypeVar("T")

#: How long a server on this machine may take to say how it is.
PROBE_SECONDS = 2.0
#: How long any other answer may take: a laptop may be busy, and a rollback waits for the step under way.
ANSWER_SECONDS = 600.0
#: Shorter than the time after which servers close an idle connection (5 s), so that no request meets a closed one.
KEEPALIVE_SECONDS = 3.0
#: How much of an error page is repeated, and how much of the address to which a server redirects.
MAX_ERROR_PAGE = 200
MAX_TARGET_CHARACTERS = 300
#: The longest event of a stream. SGLang repeats all tokens in each one, with as many log-probs as were asked for.
MAX_EVENT_BYTES = 64 << 20
#: HTTP statuses of a server that is busy or restarting.
BUSY_STATUSES = (429, 503)
#: The error code for a prompt that does not fit the model's context.
TOO_LONG = "context_length_exceeded"
GIVE_KEY = "Give --api-key, or set SGLANG_API_KEY."
CHAT, READY = "/v1/chat/completions", "/readyz"
DATA, DONE = b"data:", b"[DONE]"
SENTENCE_ENDS = (".", "!", "?")


class ServerError(UserError):
    """A request got no usable answer. The text is a sentence for users, without passwords and keys."""

    def __init__(
        self,
        text: str,
        *,
        message: str | None = None,
        status: int = 0,
        code: Any = None,
        retry_after: float | None = None,
        was_sent: bool = True,
    ) -> None:
        super().__init__(text)
        self.message = text if message is None else message
        """What the server says itself; else, why there is no answer."""
        self.status = status
        """The HTTP status; 0 if there is no whole answer."""
        self.code = code
        """OpenAI's code of the error."""
        self.retry_after = retry_after
        """After how many seconds the server wants to be asked again, if it says it."""
        self.was_sent = was_sent
        """Whether the server may have seen the request."""

    @property
    def is_too_long(self) -> bool:
        """Whether the prompt does not fit the model's context. Another prompt may fit."""
        return bool(self.code == TOO_LONG)

    @property
    def is_refusal(self) -> bool:
        """Whether the server answers, and another request may succeed: it is not the key that is refused."""
        return self.status not in (0, HTTPStatus.UNAUTHORIZED)

    def reworded(self, text: str) -> "ServerError":
        """The same failure with another sentence."""
        return ServerError(
            text,
            message=self.message,
            status=self.status,
            code=self.code,
            retry_after=self.retry_after,
            was_sent=self.was_sent,
        )


@dataclass(frozen=True, slots=True)
class Retries:
    """When a request is sent again, and after how long."""

    attempts: float = 1
    """How often a request is sent at most; may be infinite."""
    statuses: Container[int] = BUSY_STATUSES
    unsent: bool = False
    """Also if no connection could be made."""
    broken: bool = False
    """Also if there was no answer in time, or the connection broke: for requests that may be carried out twice."""
    first_pause: float = 0.5
    """Seconds, if the server names none. The pause doubles with each attempt, up to the maximum."""
    max_pause: float = 30.0
    spread: float = 0.25
    """Pauses are longer by a random part up to this one, so that callers do not all come back at once."""

    def cover(self, failure: ServerError, attempts: int) -> bool:
        """Whether a request that has been sent so often is sent again."""
        if attempts >= self.attempts:
            return False
        if failure.status:
            return failure.status in self.statuses
        return self.broken if failure.was_sent else self.unsent

    def pause(self, attempts: int, retry_after: float | None) -> float:
        """Seconds to wait after so many attempts."""
        seconds = self.first_pause * 2 ** min(attempts - 1, 10) if retry_after is None else retry_after
        return min(seconds, self.max_pause) * random.uniform(1.0, 1.0 + self.spread)


class ApiClient:
    """Requests to one server, with JSON bodies. Calls raise ServerError.

    - A request is sent again as `retries` says. `on_retry` is told each failure and the pause after it, and may raise.
    - Of an answer, no more than `max_body_bytes` are kept in memory.
    - A proxy is used only if `through_proxy`, as the environment says. No redirect is followed.
    - An address or a key that cannot be used raises ServerError with the first request, or in `check`.
    """

    def __init__(
        self,
        url: str,
        key: str = "",
        *,
        name: str = "",
        key_advice: str = "",
        headers: Mapping[str, str] | None = None,
        retries: Retries | None = None,
        on_retry: Callable[[ServerError, float], None] | None = None,
        through_proxy: bool = False,
        connect_seconds: float | None = None,
        max_body_bytes: int | None = None,
    ) -> None:
        """`name` stands for the server in messages, else its address; `key_advice` says how to give another key."""
        self.url = url_without_account(url.rstrip("/"))
        """For messages."""
        self._name = name or self.url
        self._key_advice = key_advice
        self._retries = retries or Retries()
        self._on_retry = on_retry
        self._max_body_bytes = max_body_bytes
        self._key = key.strip()
        self._new_client: Callable[[], HttpClient] = partial(
            HttpClient,
            url.rstrip("/"),
            {**key_header(key), **(headers or {})},
            keepalive_seconds=KEEPALIVE_SECONDS,
            connect_seconds=connect_seconds,
            through_proxy=through_proxy,
        )

    @cached_property
    def _http(self) -> HttpClient:
        try:
            return self._new_client()
        except ValueError as error:
            text = f"{self.url} is not the address of a server: {error}."
        except HttpError as error:
            text = f"The API key cannot be sent: {error}. {self._key_advice}".rstrip()
        raise ServerError(text, was_sent=False) from None

    def check(self) -> None:
        """Raise ServerError for an address or a key that cannot be used."""
        assert self._http

    async def close(self) -> None:
        if "_http" in self.__dict__:
            await self._http.close()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
        retries: Retries | None = None,
    ) -> HttpResponse:
        """An answer that is a success (2xx). Each attempt may take so many `seconds`."""
        content, policy = encoded(body), retries or self._retries
        attempts = 0
        while True:
            try:
                response = await self.send(method, path, content, headers=headers, seconds=seconds)
                if response.is_success:
                    return response
                raise self._refusal(response)
            except ServerError as failure:
                attempts += 1
                if not policy.cover(failure, attempts):
                    raise
                pause = policy.pause(attempts, failure.retry_after)
                if self._on_retry is not None:
                    self._on_retry(failure, pause)
            await asyncio.sleep(pause)

    async def send(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> HttpResponse:
        """The answer, whatever its status."""
        with self._failures(seconds):
            async with asyncio.timeout(seconds), self._http.stream(method, path, encoded(body), headers) as response:
                await response.read(self._max_body_bytes)
                return response

    @contextlib.asynccontextmanager
    async def stream(self, method: str, path: str, body: Any, repeatable: bool = False) -> AsyncIterator[HttpResponse]:
        """A successful answer, whose body is read as it arrives. For `repeatable`, see `HttpClient.stream`.

        Leaving it before its end closes its connection, by which the server knows that nobody waits.
        """
        with self._failures():
            async with self._http.stream(method, path, encoded(body), repeatable=repeatable) as response:
                if not response.is_success:
                    await response.read(self._max_body_bytes)
                    raise self._refusal(response)
                yield response

    @contextlib.contextmanager
    def _failures(self, seconds: float | None = None) -> Iterator[None]:
        """Raise ServerError where there is no whole answer."""
        try:
            yield
        except ConnectFailed as error:
            text = f"No server answers at {self.url}: start the server or check the address."
            raise ServerError(text, message=str(error), was_sent=False) from error
        except HttpError as error:
            raise ServerError(f"The connection to {self._name} broke: {error}", message=str(error)) from error
        except TimeoutError:
            if seconds is None:
                raise
            text = f"{self._name} did not answer within {seconds:g} seconds"
            raise ServerError(text, message=f"no answer within {seconds:g} seconds") from None

    def _refusal(self, response: HttpResponse) -> ServerError:
        status = response.status_code
        message, code = read_error(response, self._key)
        if status == HTTPStatus.UNAUTHORIZED and self._key_advice:
            message = f"{message if message.endswith(SENTENCE_ENDS) else f'{message}.'} {self._key_advice}"
        return ServerError(
            f"{self._name} answers {status}: {message}",
            message=message,
            status=status,
            code=code,
            retry_after=retry_after(response.headers),
        )


class Client:
    """Blocking calls to a server of this package. They raise ServerError.

    - It never goes through a proxy.
    - The text of an error that the server answers is the server's own sentence; if a key is missing or wrong, it says
      how to give one.
    """

    def __init__(self, url: str, key: str = "", **settings: Any) -> None:
        """`settings` are those of ApiClient."""
        self._api = ApiClient(url, key, key_advice=GIVE_KEY, **settings)
        self._api.check()
        self.shown_url = self._api.url
        """For messages."""
        self.answer_id = ""
        """The id of the answer that `chat` has read last."""
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._api.close())
        self._runner.close()

    def ready(self, seconds: float = PROBE_SECONDS) -> dict[str, Any]:
        """What the server says about itself; see `probe`."""
        return self._runner.run(ready_answer(self._api, seconds))

    def model(self) -> dict[str, Any]:
        """The model that the server serves, as `/v1/models` describes it."""
        try:
            model = self.ask("GET", "/v1/models")["data"][0]
            return {"id": str(model["id"]), "max_input_tokens": int(model["max_input_tokens"])}
        except (ValueError, KeyError, IndexError, TypeError):
            raise UserError(f"The server at {self.shown_url} is not a server of openclaw-rl.") from None

    def roll_back(self, version: int | None, *, retrain: bool = False, line: str = SHARED) -> int:
        """Roll a line back to a policy version, or to the previous checkpoint; returns the version that serves now.

        With `retrain`, to the newest that was not trained on deleted turns, and train later ones anew.
        """
        asked = {"version": version, "retrain": retrain, "line": line}
        return int(self.ask("POST", "/v1/policy/rollback", asked)["policy_version"])

    def relearn(self, line: str = SHARED) -> int:
        """Learn from the turns that the guard set aside, all the same; how many there are."""
        return int(self.ask("POST", "/v1/policy/relearn", {"line": line})["turns"])

    def merge(self, folder: Path) -> int:
        """Let the shared line continue from an average of lines; the version under which it serves."""
        return int(self.ask("POST", "/v1/policy/merge", {"folder": str(folder.resolve())})["policy_version"])

    def drop_line(self, line: str) -> bool:
        """Delete a person's line of policies for good; whether there was one."""
        return bool(self.ask("DELETE", f"/v1/lines/{quote(line, safe='')}")["deleted"])

    def rate(self, answer_id: str, thumb: str, text: str = "") -> None:
        """Rate an answer: `up` or `down`, and why."""
        self.ask("POST", "/v1/feedback", {"id": answer_id, "thumb": thumb, "text": text})

    def correct(self, answer_id: str, wanted: str) -> bool:
        """Say what an answer should have been. Whether it is now an example for your next conversations."""
        return bool(self.ask("POST", "/v1/feedback", {"id": answer_id, "correction": wanted})["example"])

    def chat(self, messages: Sequence[Mapping[str, str]], **fields: Any) -> Iterator[dict[str, Any]]:
        """The pieces of an answer, as they are written. `fields` are further fields of the request."""
        pieces = self._chat_events({"messages": messages, "stream": True, **fields})
        try:
            while (event := self._run(next_event(pieces, ANSWER_SECONDS))) is not None:
                self.answer_id = event["id"]
                yield from (choice["delta"] for choice in event["choices"])
        finally:
            self._runner.run(close_events(pieces))

    async def _chat_events(self, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        async with self._api.stream("POST", CHAT, body) as response:
            async for event in events(response):
                if "error" in event:
                    raise ServerError(event["error"]["message"], status=response.status_code)
                yield event

    def ask(self, method: str, path: str, body: Any = None, seconds: float = ANSWER_SECONDS) -> Any:
        """The JSON of an answer."""
        response = self._run(self._api.call(method, path, body, seconds=seconds))
        try:
            return response.json()
        except (ValueError, RecursionError):
            raise UserError(f"The server at {self.shown_url} is not a server of openclaw-rl.") from None

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._runner.run(work)
        except ServerError as error:
            gone = f"The server at {self.shown_url} does not answer: {error.message}. Is it still running?"
            raise error.reworded(error.message if error.status else gone) from None


def ready_state(url: str, key: str = "") -> dict[str, Any]:
    """What the server at an address says about itself; see `probe`."""
    return asyncio.run(probe(url, key))


async def probe(url: str, key: str = "", seconds: float = PROBE_SECONDS) -> dict[str, Any]:
    """What the server at an address says about itself (`/readyz`), ready or not; empty if it says nothing that can be
    understood.

    Without a key, a server that has keys says only whether it is ready.
    """
    api = ApiClient(url, key)
    try:
        return await ready_answer(api, seconds)
    finally:
        await api.close()


async def ready_answer(api: ApiClient, seconds: float) -> dict[str, Any]:
    """What a server says about itself; see `probe`."""
    try:
        state = (await api.send("GET", READY, seconds=seconds)).json()
    except (ServerError, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


async def next_event(pieces: AsyncIterator[Any], seconds: float) -> Any:
    """The next event of a stream; None at its end. Raises ServerError if it does not come in time."""
    try:
        async with asyncio.timeout(seconds):
            return await anext(pieces, None)
    except TimeoutError:
        reason = f"no further word within {seconds:g} seconds"
        raise ServerError(f"The server stopped answering: {reason}", message=reason) from None


async def close_events(pieces: AsyncGenerator[Any, None]) -> None:
    await pieces.aclose()


async def whole_answer(answer: HttpResponse) -> Any:
    """The JSON of an answer that is not streamed. Raises HttpError as `events` does."""
    content = await answer.read(MAX_EVENT_BYTES)
    if answer.is_cut:
        raise HttpError(f"the answer is longer than {MAX_EVENT_BYTES} bytes")
    try:
        return from_json(content)
    except ValueError as error:
        raise HttpError(f"the answer is not JSON: {error}") from error


async def events(answer: HttpResponse) -> AsyncIterator[Any]:
    """The JSON objects of a stream of server-sent events.

    Raises HttpError if it breaks off, or holds one that is not JSON or too long.
    """
    unfinished = bytearray()
    async for piece in answer.pieces():
        begun = len(unfinished)
        unfinished += piece
        end = unfinished.rfind(b"\n", begun) + 1
        if len(unfinished) - end > MAX_EVENT_BYTES:
            raise HttpError(f"an event is longer than {MAX_EVENT_BYTES} bytes")
        if end:
            lines = bytes(unfinished[:end])
            del unfinished[:end]
            for line in lines.splitlines():
                if line.startswith(DATA) and (data := line[len(DATA) :].strip()) != DONE:
                    try:
                        event = from_json(data)
                    except ValueError as error:
                        raise HttpError(f"an event is not JSON: {error}") from error
                    yield event


def encoded(body: Any) -> bytes:
    """A body as it is sent. JSON is escaped to ASCII, so that lone surrogates in a text can be sent."""
    if body is None:
        return b""
    return body if isinstance(body, bytes) else json.dumps(body).encode()


def server_root(url: str) -> str:
    """A server's address without `/v1`, which users may give or not."""
    return url.rstrip("/").removesuffix("/v1")


def key_header(key: str) -> dict[str, str]:
    """The header that gives an API key, if there is one. A key from a file often ends with a newline."""
    return {"Authorization": f"Bearer {key.strip()}"} if key.strip() else {}


def read_error(response: HttpResponse, key: str) -> tuple[str, Any]:
    """The message and the code of an error answer; of one that is not JSON, its beginning. Neither repeats the key."""
    target = response.headers.get("location")
    if 300 <= response.status_code < 400 and target:
        to = without_key(url_without_account(target), key)[:MAX_TARGET_CHARACTERS]
        return f"it redirects to {to}: give the URL of the server itself", None
    try:
        answer = response.json()
    except (ValueError, RecursionError):
        return without_key(response.text, key)[:MAX_ERROR_PAGE], None
    error = answer.get("error") if isinstance(answer, dict) else None
    code = error.get("code") if isinstance(error, dict) else None
    return without_key(error_message(answer), key), without_key(code, key) if isinstance(code, str) else code


def without_key(text: str, key: str) -> str:
    """A text that a server says. Some repeat the key that they refuse."""
    return text.replace(key, "***") if key else text


def error_message(answer: Any) -> str:
    """The message of an error answer, in the forms that servers use."""
    while isinstance(answer, dict):
        answer = next((answer[name] for name in ("error", "message", "detail") if name in answer), str(answer))
    return str(answer)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The seconds in a `Retry-After` header, or until its date; None if it holds nothing that is understood."""
    given = headers.get("retry-after", "")
    with contextlib.suppress(ValueError):
        seconds = float(given)
        return max(0.0, seconds) if math.isfinite(seconds) else None
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, parsedate_to_datetime(given).timestamp() - time.time())
    return None
