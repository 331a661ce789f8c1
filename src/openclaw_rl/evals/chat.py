"""The interface through which evaluations ask a model, and its client for any OpenAI-compatible server."""

import asyncio
import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol, Self

import httpx

from openclaw_rl.client import key_header, read_error
from openclaw_rl.errors import UserError
from openclaw_rl.http_client import url_without_account

Message = dict[str, Any]
Tool = Mapping[str, Any]

#: Longest reply in tokens, unless an evaluation sets another limit.
MAX_TOKENS = 512
#: HTTP statuses of a server that is busy or restarting: the request is sent again.
BUSY_STATUSES = (429, 503)
#: The error code for a prompt that does not fit the model's context.
TOO_LONG = "context_length_exceeded"
#: How often a request is sent to a busy server before it counts as failed.
MAX_ATTEMPTS = 6
#: Seconds before the second attempt if the server names none. The pause doubles with each attempt, up to the maximum.
FIRST_PAUSE, MAX_PAUSE = 0.5, 30.0
#: A small model on a laptop may take this long for one reply.
TIMEOUT_SECONDS = 300.0


class ChatFailed(UserError):
    """The server gave no reply. This says nothing about the model."""


class ChatTooLong(ChatFailed):
    """The prompt does not fit the model's context. Another prompt may fit."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it. The arguments are text, which may not be valid JSON."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """A model's reply."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()


class Chat(Protocol):
    """A model to ask.

    `session` names the conversation; with `keep=False` the server records nothing, with `notes=False` it gives none.
    """

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int = MAX_TOKENS,
        temperature: float | None = None,
        seed: int | None = None,
        session: str | None = None,
        keep: bool = True,
        notes: bool = True,
    ) -> Reply:
        """Raises ChatFailed."""
        ...


class HttpChat:
    """Asks a server at `base_url` (with or without `/v1`), and tries again while it is busy.

    A server that is `local` is never asked through a proxy.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        key: str = "",
        timeout: float = TIMEOUT_SECONDS,
        local: bool = False,
    ) -> None:
        root = base_url.rstrip("/").removesuffix("/v1")
        self.url = f"{root}/v1/chat/completions"
        self.shown = url_without_account(self.url)
        """For messages."""
        self._model = {"model": model} if model else {}
        headers = {"Content-Type": "application/json", **key_header(key)}
        self._client = httpx.AsyncClient(headers=headers, timeout=timeout, trust_env=not local)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.aclose()

    async def ask(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Tool] = (),
        max_tokens: int = MAX_TOKENS,
        temperature: float | None = None,
        seed: int | None = None,
        session: str | None = None,
        keep: bool = True,
        notes: bool = True,
    ) -> Reply:
        """Raises ChatTooLong if the prompt does not fit the model's context, ChatFailed if there is no reply."""
        optional = {
            "tools": list(tools) or None,
            "temperature": temperature,
            "seed": seed,
            "session_id": session,
            "store": None if keep else False,
        }
        body = {**self._model, "messages": list(messages), "max_tokens": max_tokens}
        body |= {name: value for name, value in optional.items() if value is not None}
        return read_reply(await self._send(json.dumps(body), {} if notes else {"X-Notes": "off"}))

    async def _send(self, content: str, headers: Mapping[str, str]) -> Any:
        for attempt in range(MAX_ATTEMPTS):
            response = await self._post(content, headers)
            if response.status_code not in BUSY_STATUSES or attempt == MAX_ATTEMPTS - 1:
                break
            await asyncio.sleep(pause(response.headers, attempt))
        if response.status_code != 200:
            message, code = read_error(response)
            failure = ChatTooLong if code == TOO_LONG else ChatFailed
            raise failure(f"{self.shown} answers {response.status_code}: {message}")
        try:
            return response.json()
        except (ValueError, RecursionError) as error:
            raise ChatFailed(f"{self.shown} does not answer with JSON: check the address.") from error

    async def _post(self, content: str, headers: Mapping[str, str]) -> httpx.Response:
        try:
            return await self._client.post(self.url, content=content, headers=headers)
        except httpx.LocalProtocolError:
            # The error's text contains the key.
            raise ChatFailed("The API key cannot be sent in an HTTP header: check it.") from None
        except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise ChatFailed(f"No server answers at {self.shown}: start the server or check the address.") from error
        except httpx.TimeoutException as error:
            raise ChatFailed(f"{self.shown} took too long to reply.") from error
        except httpx.HTTPError as error:
            raise ChatFailed(
                f"The connection to {self.shown} broke: {type(error).__name__} {error}".rstrip()
            ) from error


def pause(headers: Mapping[str, str], attempt: int) -> float:
    """Seconds to wait for a busy server: what it asks for, or longer each time; random, so that callers spread out."""
    try:
        seconds = float(headers.get("retry-after", "nan"))
    except ValueError:  # a date is ignored
        seconds = math.nan
    if math.isnan(seconds):
        seconds = FIRST_PAUSE * 2 ** min(attempt, 10)
    return min(max(seconds, 0.0), MAX_PAUSE) * random.uniform(1.0, 1.25)


def read_reply(body: Any) -> Reply:
    """The first choice of a chat completion. Raises ChatFailed if the body is not a chat completion."""
    try:
        choice = body["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        reply = Reply(
            message.get("content") or "",
            tuple(ToolCall(call["name"], call["arguments"]) for call in calls),
        )
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ChatFailed("The reply is not a chat completion: check the address.") from error
    texts = (reply.text, *(text for call in reply.tool_calls for text in (call.name, call.arguments)))
    if not all(isinstance(text, str) for text in texts):
        raise ChatFailed("The reply is not a chat completion: check the address.")
    return reply
