"""How every evaluation talks to a model: a question, a reply; and over HTTP, to any OpenAI-compatible server."""

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

Message = dict[str, Any]
Tool = Mapping[str, Any]

#: Longest reply, unless an evaluation wants another.
MAX_TOKENS = 512
#: Statuses of a server that is busy or restarting, and will answer later.
BUSY = (429, 503)
#: The code of a refusal that only this question gets.
TOO_LONG = "context_length_exceeded"
#: How often a busy server is asked before it counts as a failure.
ATTEMPTS = 6
#: The first pause where the server names none; it doubles, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
#: How long a small model on a laptop may take for one reply.
TIMEOUT_SECONDS = 300.0


class ChatFailed(UserError):
    """There is no reply, for a reason that is not the model's: nothing can be said of it."""


class ChatTooLong(ChatFailed):
    """The model cannot hold this question; it may hold another."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call as the model wrote it: the arguments are JSON text, right or wrong."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What a model replied."""

    text: str
    tool_calls: tuple[ToolCall, ...] = ()


class Chat(Protocol):
    """Somebody who replies. `session` names the conversation; without `keep` nothing of the request is recorded."""

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
    ) -> Reply:
        """Raises ChatFailed."""
        ...


class HttpChat:
    """Asks a server at `base_url` (with or without its `/v1`), and waits for it when it is busy.

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
    ) -> Reply:
        """Raises ChatFailed when there is no reply, ChatTooLong where the model has no room for one."""
        wishes = {
            "tools": list(tools) or None,
            "temperature": temperature,
            "seed": seed,
            "session_id": session,
            "store": None if keep else False,
        }
        body = {**self._model, "messages": list(messages), "max_tokens": max_tokens}
        body |= {name: wish for name, wish in wishes.items() if wish is not None}
        return read_reply(await self._send(json.dumps(body)))

    async def _send(self, content: str) -> Any:
        for attempt in range(ATTEMPTS):
            response = await self._post(content)
            if response.status_code not in BUSY or attempt == ATTEMPTS - 1:
                break
            await asyncio.sleep(pause(response.headers, attempt))
        if response.status_code != 200:
            message, code = read_error(response)
            failure = ChatTooLong if code == TOO_LONG else ChatFailed
            raise failure(f"{self.url} answers {response.status_code}: {message}")
        try:
            return response.json()
        except ValueError as error:
            raise ChatFailed(f"{self.url} answers with something that is no JSON: check the address.") from error

    async def _post(self, content: str) -> httpx.Response:
        try:
            return await self._client.post(self.url, content=content)
        except httpx.LocalProtocolError:
            # What it says would show the key.
            raise ChatFailed("The API key cannot be sent in a header: check it.") from None
        except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise ChatFailed(f"Nobody answers at {self.url}: start the server or check the address.") from error
        except httpx.TimeoutException as error:
            raise ChatFailed(f"{self.url} took too long to reply.") from error
        except httpx.HTTPError as error:
            raise ChatFailed(f"{self.url} broke off: {type(error).__name__} {error}".rstrip()) from error


def pause(headers: Mapping[str, str], attempt: int) -> float:
    """Seconds to wait for a busy server: what it asks for, else longer each time, and never all callers at once."""
    try:
        wanted = float(headers.get("retry-after", "nan"))
    except ValueError:  # a date counts as nothing said
        wanted = math.nan
    if math.isnan(wanted):
        wanted = FIRST_PAUSE * 2**attempt
    return min(max(wanted, 0.0), LONGEST_PAUSE) * random.uniform(1.0, 1.25)


def read_reply(body: Any) -> Reply:
    """The first choice of a chat completion. Raises ChatFailed if it is none."""
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
