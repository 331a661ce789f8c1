"""Going on from a recorded turn with its very tokens, although clients return the history changed.

Clients strip thoughts, write arguments anew, rename calls and turn "" into null. Two things follow. A conversation
is recognised by what it says, not by how it is written: `keys`. And the tokens of what was said before come from
the record, with only the new messages rendered: `continue_turn`.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message, RenderedPrompt, content_text
from openclaw_rl.types import Continuation

#: A noncharacter, as the tokenizer's guard is one.
MARK = "\ufdd1"
_THOUGHTS = re.compile(r"\A\s*<think>.*?</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ConversationKeys:
    """What a request says, as digests: `request` of all of it, `ends` after each of the assistant's messages.

    `ends` are (number of messages covered, digest), the longest first.
    """

    request: bytes
    ends: list[tuple[int, bytes]]


def keys(owner: str, messages: Sequence[Message], ignored: Sequence[bool]) -> ConversationKeys:
    """The keys of a request of `owner`, leaving out messages that are not part of the conversation."""
    key = blake2b(owner.encode(), digest_size=16).digest()
    ends = []
    for number, message in enumerate(messages, start=1):
        # What a client tells the model about itself may change from turn to turn; the conversation goes on.
        if ignored[number - 1] or message["role"] in ("system", "developer"):
            continue
        key = extend(key, message)
        if message["role"] == "assistant":
            ends.append((number, key))
    return ConversationKeys(key, ends[::-1])


def extend(key: bytes, message: Mapping[str, Any]) -> bytes:
    """The key of a conversation with one more message."""
    said = json.dumps(meaning(message), ensure_ascii=False, sort_keys=True)
    return blake2b(said.encode("utf-8", "surrogatepass"), key=key, digest_size=16).digest()


def meaning(message: Mapping[str, Any]) -> list[Any]:
    """What a message says, without what clients change when they return it."""
    if message["role"] == "tools":
        return ["tools", message["tools"]]
    text = content_text(message.get("content"))
    if message["role"] != "assistant":
        return [message["role"], text]
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return ["assistant", _THOUGHTS.sub("", text).strip(), [[c["name"], arguments(c["arguments"])] for c in calls]]


def arguments(text: str) -> Any:
    """A call's arguments as a value; numbers are the same that are so to JavaScript: 5.0 and 5, and very large ones."""
    try:
        return json.loads(text, parse_float=_number, parse_int=_number)
    except (ValueError, RecursionError):
        return text


def _number(text: str) -> float | int:
    value = float(text)
    return int(value) if value.is_integer() else value


class TemplateInput(NamedTuple):
    """All that the template is given."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RecordedTurn:
    """The turn that a conversation goes on from."""

    ids: list[int]
    """Prompt and response."""
    response: list[int]
    request: Callable[[], Sequence[Message]]
    """The messages it was given (tools first, as role `tools`); fetched only when they matter."""
    earlier: Callable[[], Sequence[list[int]]] = tuple
    """The responses of the turns that it went on from, the latest first; likewise."""


def continue_turn(
    renderer: ChatRenderer, chat: TemplateInput, plain: RenderedPrompt, covered: int, turn: RecordedTurn
) -> tuple[RenderedPrompt, Continuation]:
    """The prompt of a conversation whose first `covered` messages end with a recorded turn's response.

    `plain` is the conversation rendered as it came.
    """
    if plain.ids[: len(turn.ids)] == turn.ids:
        return plain, Continuation.EXTENDS
    shown = shown_whole(renderer, chat.messages[covered - 1], turn.response)
    same = shown and same_request(chat, covered, turn)
    new = accepted_part(renderer, chat, covered, [turn.response, *turn.earlier()]) if same else None
    if new is None:
        return plain, Continuation.FORKED
    ids = turn.ids + renderer.tokenizer.encode_chat(new)
    return RenderedPrompt(ids, plain.opens_reasoning), Continuation.REALIGNED


def shown_whole(renderer: ChatRenderer, message: Message, response: list[int]) -> bool:
    """Whether a client that returns this message was shown all of the response: not if a stop string cut it short."""
    text = renderer.tokenizer.backend.decode(response, skip_special_tokens=True)
    return bool(message.get("tool_calls")) or text.rstrip().endswith(content_text(message.get("content")).strip())


def same_request(chat: TemplateInput, covered: int, turn: RecordedTurn) -> bool:
    """Whether what now stands before the response is what the turn was given, system prompt and tools included."""
    now = [meaning(message) for message in chat.messages[: covered - 1]]
    if chat.tools:
        now.insert(0, ["tools", list(chat.tools)])
    return now == [meaning(message) for message in turn.request()]


def accepted_part(
    renderer: ChatRenderer, chat: TemplateInput, covered: int, responses: Sequence[list[int]]
) -> str | None:
    """The new part; None also if the template accepts the conversation only as the client returns it."""
    try:
        return new_part(renderer, chat, covered, responses)
    except ChatError:
        # A call as it was sampled is an ordinary answer to the template, which may not stand where a call may.
        return None


def new_part(renderer: ChatRenderer, chat: TemplateInput, covered: int, responses: Sequence[list[int]]) -> str | None:
    """What the template writes after a response, up to the next answer; None if it would rewrite what was said.

    `responses` are those that end with message `covered` and before, the latest first. The template is given them as
    they were sampled, whatever the client made of them: only so does it show what it would do to them.
    """
    tokenizer = renderer.tokenizer
    messages, tools, options = chat
    asked = list(messages[: covered - 1])
    answered = [i for i, message in enumerate(asked) if message["role"] == "assistant"]
    for i, response in zip(reversed(answered), responses[1:], strict=False):
        asked[i] = {"role": "assistant", "content": response_text(renderer, response)}
    said = response_text(renderer, responses[0])
    # A mark shows where the response ends: its own text may occur in what the template writes around it.
    marked = renderer.text([*asked, {"role": "assistant", "content": said + MARK}], tools, options, answer=False)
    upto, mark, after = marked.rpartition(MARK)
    whole = renderer.text([*asked, {"role": "assistant", "content": said}, *messages[covered:]], tools, options)
    if not mark or not upto.endswith(tokenizer.guard(said)) or not whole.startswith(upto + after):
        return None
    return without_end(renderer, responses[0], whole[len(upto) :])


def response_text(renderer: ChatRenderer, response: list[int]) -> str:
    """What was sampled, as text, without the token that ended it."""
    ended = bool(response) and response[-1] in renderer.tokenizer.eos_ids
    return renderer.tokenizer.backend.decode(response[:-1] if ended else response, skip_special_tokens=False)


def without_end(renderer: ChatRenderer, response: list[int], new: str) -> str | None:
    """The new part without the token that ends the response, if that was sampled; None if it is not there."""
    if not response or response[-1] not in renderer.tokenizer.eos_ids:
        return new
    end = renderer.tokenizer.backend.id_to_token(response[-1]) or ""
    return new.removeprefix(end) if new.startswith(end) else None
