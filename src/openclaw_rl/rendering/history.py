"""Continues a recorded turn with exactly its tokens, although clients change the history that they send back.

Clients strip reasoning, reformat arguments, rename calls, turn "" into null and add lines to a user's words. Therefore
a conversation is recognised by what it says and not by how it is written (`keys`), and the tokens of earlier messages
come from the record; only the new messages are rendered (`continue_turn`).
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from openclaw_rl.rendering.chat import (
    ChatError,
    ChatRenderer,
    Message,
    RenderedPrompt,
    TemplateInput,
    content_text,
    images_in,
)
from openclaw_rl.rendering.clients import is_passing, message_words
from openclaw_rl.rendering.known import Beginnings, remembered
from openclaw_rl.types import Continuation

#: Marks where a response ends. A Unicode noncharacter, which no message has reason to contain.
END_MARK = "\ufdd1"
#: How much memory the keys of requests may take.
MAX_KEYS_BYTES = 16_000_000
_REASONING = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ConversationKeys:
    """Digests of what a request says."""

    request: bytes
    """Of all messages."""
    ends: tuple[tuple[int, bytes], ...] = ()
    """Of the messages up to each assistant message: (number of messages covered, digest), the longest first."""
    messages: int = 0


def keys_of_none(owner: str) -> ConversationKeys:
    return ConversationKeys(blake2b(owner.encode(), digest_size=16).digest())


def longer_keys(before: ConversationKeys, messages: Sequence[Mapping[str, Any]]) -> ConversationKeys:
    """The keys with more messages. One that a client sends once and does not keep has no effect."""
    key = before.request
    ends = []
    for number, message in enumerate(messages, before.messages + 1):
        if said_in(message):
            key = extend(key, message)
        if message["role"] == "assistant":
            ends.append((number, key))
    return ConversationKeys(key, (*reversed(ends), *before.ends), before.messages + len(messages))


def extend(key: bytes, message: Mapping[str, Any]) -> bytes:
    """The key of a conversation with one more message."""
    return blake2b(said_in(message), key=key, digest_size=16).digest()


#: The keys of an owner's request.
keys = Beginnings(MAX_KEYS_BYTES, keys_of_none, longer_keys)


@remembered
def said_in(message: Mapping[str, Any]) -> bytes:
    """A digest of what a message says; empty if it does not count."""
    words = message_words(message)
    # Clients may change the system prompt from turn to turn within one conversation.
    if message["role"] in ("system", "developer") or (not words and is_passing(message)):
        return b""
    text = json.dumps(meaning(message, words), ensure_ascii=False, sort_keys=True)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def meaning(message: Mapping[str, Any], words: str | None = None) -> list[Any]:
    """What a message says, without what clients change when they send it back. `words` are its words, if known."""
    if message["role"] == "tools":
        return ["tools", message["tools"]]
    text = message_words(message) if words is None else words
    if message["role"] != "assistant":
        return [message["role"], text, *images_in(message.get("content"))]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return ["assistant", _REASONING.sub("", text).strip(), [[c["name"], arguments(c["arguments"])] for c in calls]]


def arguments(text: str) -> Any:
    """A call's arguments as a value; numbers that JavaScript cannot tell apart are equal, such as 5.0 and 5."""
    try:
        return json.loads(text, parse_float=_number, parse_int=_number)
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """The turn that a conversation continues."""

    prompt: list[int]
    response: list[int]
    responses: Callable[[], Sequence[list[int]]]
    """Fetches its response and those of the turns before it, the latest first. Called only if they are needed."""
    request: Callable[[], Sequence[Message]]
    """Fetches the messages of its request (tools first, as role `tools`). Called only if they are needed."""

    @property
    def ids(self) -> list[int]:
        """The tokens of prompt and response."""
        return self.prompt + self.response

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.response)


def continue_turn(
    renderer: ChatRenderer, chat: TemplateInput, rendered: RenderedPrompt, covered: int, turn: RecordedTurn
) -> tuple[RenderedPrompt, Continuation]:
    """The prompt of a conversation whose first `covered` messages end with a recorded turn's response.

    `rendered` is the conversation as the client sent it.
    """
    if rendered.begins_with(turn.prompt, turn.response):
        return rendered, Continuation.EXTENDS
    responses = turn.responses()
    complete = has_whole_response(renderer, chat.messages[covered - 1], responses[0])
    same = complete and same_request(chat, covered, turn)
    new_text = accepted_part(renderer, chat, covered, responses) if same else None
    if new_text is None:
        return rendered, Continuation.FORKED
    ids = turn.ids + renderer.tokenizer.encode_chat(new_text)
    return RenderedPrompt(ids, rendered.opens_reasoning, rendered.ends_reasoning), Continuation.REALIGNED


def has_whole_response(renderer: ChatRenderer, message: Message, response: list[int]) -> bool:
    """Whether the client's message contains the whole response; it does not if a stop string cut the response short."""
    text = renderer.tokenizer.backend.decode(response, skip_special_tokens=True)
    return bool(message.get("tool_calls")) or text.rstrip().endswith(content_text(message.get("content")).strip())


def same_request(chat: TemplateInput, covered: int, turn: RecordedTurn) -> bool:
    """Whether the messages before the response are those of the turn's request, system prompt and tools included."""
    now = [meaning(message) for message in chat.messages[: covered - 1]]
    if chat.tools:
        now.insert(0, ["tools", list(chat.tools)])
    return now == [meaning(message) for message in turn.request()]


def accepted_part(
    renderer: ChatRenderer, chat: TemplateInput, covered: int, responses: Sequence[list[int]]
) -> str | None:
    """What `new_part` returns; None also if the template accepts the conversation only as the client sends it back."""
    try:
        return new_part(renderer, chat, covered, responses)
    except ChatError:
        # The template sees a sampled tool call as an ordinary answer, and may not allow one in that place.
        return None


def new_part(renderer: ChatRenderer, chat: TemplateInput, covered: int, responses: Sequence[list[int]]) -> str | None:
    """What the template writes between a response and the next answer; None if it changes earlier messages.

    `responses` are the responses up to message `covered`, the latest first. The template is given them as they were
    sampled and not as the client sends them back, to see whether it would change them.
    """
    tokenizer = renderer.tokenizer
    messages, tools, options = chat
    before = list(messages[: covered - 1])
    answered = [i for i, message in enumerate(before) if message["role"] == "assistant"]
    for i, earlier in zip(reversed(answered), responses[1:], strict=False):
        before[i] = {"role": "assistant", "content": response_text(renderer, earlier)}
    response = response_text(renderer, responses[0])
    # The mark shows where the response ends: the template may write the same text elsewhere.
    marked = renderer.text(
        [*before, {"role": "assistant", "content": response + END_MARK}], tools, options, answer=False
    )
    upto, mark, after = marked.rpartition(END_MARK)
    whole = renderer.text([*before, {"role": "assistant", "content": response}, *messages[covered:]], tools, options)
    if not mark or not upto.endswith(tokenizer.guard(response)) or not whole.startswith(upto + after):
        return None
    return without_end(renderer, responses[0], whole[len(upto) :])


def response_text(renderer: ChatRenderer, response: list[int]) -> str:
    """A response as text, without the end token."""
    ended = bool(response) and response[-1] in renderer.tokenizer.eos_ids
    return renderer.tokenizer.backend.decode(response[:-1] if ended else response, skip_special_tokens=False)


def without_end(renderer: ChatRenderer, response: list[int], new: str) -> str | None:
    """The new part without the end token, if the response already has it; None if the new part lacks it."""
    if not response or response[-1] not in renderer.tokenizer.eos_ids:
        return new
    end = renderer.tokenizer.backend.id_to_token(response[-1]) or ""
    return new.removeprefix(end) if new.startswith(end) else None
