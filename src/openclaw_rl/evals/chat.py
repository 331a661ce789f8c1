"""How evaluations ask a model, on any OpenAI-compatible server."""

import contextlib
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from openclaw_rl.client import CHAT, ApiClient, Retries, ServerError, server_root

Message = dict[str, Any]
Tool = Mapping[str, Any]
AnyChat = TypeVar("AnyChat", bound="Chat")

#: The wires that a server can be asked on, and their paths.
WIRES = {"chat": CHAT, "responses": "/v1/responses"}
#: OpenAI's wire of responses takes no smaller limit.
MIN_OUTPUT_TOKENS = 16
#: Longest reply in tokens, unless an evaluation sets another limit.
MAX_TOKENS = 512
#: A small model on a laptop may take this long for one reply.
TIMEOUT_SECONDS = 300.0
#: A busy server is asked again. One that stays busy counts as failed.
RETRIES = Retries(attempts=6)


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
    id: str = ""
    """The id of the completion."""
    tokens: tuple[int, int] | None = None
    """Of the prompt and of the reply; None if the server does not say."""


class Chat:
    """Asks a model on a server at `base_url` (with or without `/v1`), and tries again while it is busy.

    `wire` is one of WIRES. `fields` are further fields of every request.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str = "",
        key: str = "",
        timeout: float = TIMEOUT_SECONDS,
        retries: Retries = RETRIES,
        wire: str = "chat",
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self._fields = {**({"model": model} if model else {}), **(fields or {})}
        self._wire = wire
        self._timeout = timeout
        self._api = ApiClient(server_root(base_url), key, retries=retries, through_proxy=True)
        self.url = self._api.url
        """For messages."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._api.close()

    async def correct(self, answer_id: str, wanted: str) -> None:
        """Tell a server of this package which answer was wanted instead of one. Raises ServerError."""
        await self._api.call("POST", "/v1/feedback", {"id": answer_id, "correction": wanted}, seconds=self._timeout)

    async def note(self, text: str, scope: str = "") -> None:
        """Write a note on a server of this package, for requests with a word of `scope`. Raises ServerError."""
        await self._api.call("POST", "/v1/notes", {"text": text, "scope": scope}, seconds=self._timeout)

    async def notes(self) -> list[str]:
        """The notes that a server of this package has of this key's owner. Raises ServerError."""
        response = await self._api.call("GET", "/v1/notes", seconds=self._timeout)
        return [note["text"] for note in response.json()["data"] if note["object"] == "note"]

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
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Raises ServerError if there is no reply. This says nothing about the model.

        `session` names the conversation. With `keep=False` the server records nothing, with `notes=False` it gives no
        notes.
        """
        optional = {
            "temperature": temperature,
            "seed": seed if self._wire == "chat" else None,
            "session_id": session,
            "store": None if keep else False,
        }
        body = {**self._fields, **(chat_body if self._wire == "chat" else responses_body)(messages, tools, max_tokens)}
        body |= {name: value for name, value in optional.items() if value is not None}
        given = {**(headers or {}), **({} if notes else {"X-Notes": "off"})}
        response = await self._api.call("POST", WIRES[self._wire], body, headers=given, seconds=self._timeout)
        try:
            read = read_reply if self._wire == "chat" else read_response
            return read(response.json())
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self.url} does not answer with JSON: check the address.") from error


@contextlib.asynccontextmanager
async def opened(chats: Iterable[AnyChat]) -> AsyncIterator[list[AnyChat]]:
    """The chats, closed at the end."""
    several = [*chats]
    try:
        yield several
    finally:
        for chat in several:
            await chat.close()


def chat_body(messages: Sequence[Message], tools: Sequence[Tool], max_tokens: int) -> dict[str, Any]:
    return {"messages": list(messages), "max_tokens": max_tokens, **({"tools": list(tools)} if tools else {})}


def responses_body(messages: Sequence[Message], tools: Sequence[Tool], max_tokens: int) -> dict[str, Any]:
    """The same request on the wire of responses, with the whole conversation."""
    functions = [{"type": "function", **tool["function"]} for tool in tools]
    items = [item for message in messages for item in _items(message)]
    return {
        "input": items,
        "max_output_tokens": max(MIN_OUTPUT_TOKENS, max_tokens),
        **({"tools": functions} if functions else {}),
    }


def _items(message: Message) -> Iterator[dict[str, Any]]:
    """A message as the items of a response's input."""
    if message["role"] == "tool":
        yield {"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]}
        return
    if message.get("content"):
        yield {"role": message["role"], "content": message["content"]}
    for call in message.get("tool_calls") or ():
        yield {"type": "function_call", "call_id": call["id"], **call["function"]}


def read_response(body: Any) -> Reply:
    """The reply in a response. Raises ServerError if the body is not a response."""
    try:
        output = body["output"]
        parts = [part for item in output if item["type"] == "message" for part in item["content"]]
        calls = [{"function": item} for item in output if item["type"] == "function_call"]
        text = "".join(part["text"] for part in parts if part["type"] == "output_text")
        usage = body.get("usage") or {}
        counts = {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")}
    except (TypeError, KeyError, AttributeError) as error:
        raise ServerError("The reply is not a response: check the address.") from error
    message = {"content": text, "tool_calls": calls}
    return read_reply({"id": body.get("id"), "choices": [{"message": message}], "usage": counts})


def _tokens(usage: Any) -> tuple[int, int] | None:
    """What a server says that a request took; None if it does not say it in numbers."""
    given = usage if isinstance(usage, dict) else {}
    prompt, reply = given.get("prompt_tokens"), given.get("completion_tokens")
    return (prompt, reply) if isinstance(prompt, int) and isinstance(reply, int) else None


def read_reply(body: Any) -> Reply:
    """The first choice of a chat completion. Raises ServerError if the body is not a chat completion."""
    try:
        choice = body["choices"][0]
        message = choice["message"]
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        reply = Reply(
            message.get("content") or "",
            tuple(ToolCall(call["name"], call["arguments"]) for call in calls),
            str(body.get("id") or ""),
            _tokens(body.get("usage")),
        )
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ServerError("The reply is not a chat completion: check the address.") from error
    texts = (reply.text, *(text for call in reply.tool_calls for text in (call.name, call.arguments)))
    if not all(isinstance(text, str) for text in texts):
        raise ServerError("The reply is not a chat completion: check the address.")
    return reply
