"""How evaluations ask a model, on any OpenAI-compatible server."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from openclaw_rl.client import CHAT, ApiClient, Retries, ServerError, server_root

Message = dict[str, Any]
Tool = Mapping[str, Any]

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


class Chat:
    """Asks a model on a server at `base_url` (with or without `/v1`), and tries again while it is busy.

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
        retries: Retries = RETRIES,
    ) -> None:
        self._model = {"model": model} if model else {}
        self._timeout = timeout
        self._api = ApiClient(server_root(base_url), key, retries=retries, through_proxy=not local)
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
    ) -> Reply:
        """Raises ServerError if there is no reply. This says nothing about the model.

        `session` names the conversation. With `keep=False` the server records nothing, with `notes=False` it gives no
        notes.
        """
        optional = {
            "tools": list(tools) or None,
            "temperature": temperature,
            "seed": seed,
            "session_id": session,
            "store": None if keep else False,
        }
        body = {**self._model, "messages": list(messages), "max_tokens": max_tokens}
        body |= {name: value for name, value in optional.items() if value is not None}
        headers = {} if notes else {"X-Notes": "off"}
        response = await self._api.call("POST", CHAT, body, headers=headers, seconds=self._timeout)
        try:
            return read_reply(response.json())
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{self.url} does not answer with JSON: check the address.") from error


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
        )
    except (TypeError, KeyError, IndexError, AttributeError) as error:
        raise ServerError("The reply is not a chat completion: check the address.") from error
    texts = (reply.text, *(text for call in reply.tool_calls for text in (call.name, call.arguments)))
    if not all(isinstance(text, str) for text in texts):
        raise ServerError("The reply is not a chat completion: check the address.")
    return reply
