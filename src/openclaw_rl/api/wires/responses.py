"""Answers of OpenAI's Responses API: as one response, as a stream of events, and as a record that is read later."""

from collections.abc import AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from pydantic_core import to_json

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.api.wires.base import EVENTS, Block, BlockEvent, BlockReader, named_event
from openclaw_rl.api.wires.responses_request import NAMES, ResponsesRequest, parse_responses, translate
from openclaw_rl.ledger.errors import CaptureSuspended, DamagedTurn, UnknownTurn
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import conversation
from openclaw_rl.rendering.chat import Message
from openclaw_rl.rendering.response import Delta, Piece, ReasoningText
from openclaw_rl.rendering.tool_calls import ParsedToolCall
from openclaw_rl.types import StoredTurn

#: How the ids of responses begin, and of those whose request had instructions.
RESPONSE = "resp_"
INSTRUCTED = "resp_i_"
#: How clients ask for reasoning as `encrypted_content`.
ENCRYPTED = "reasoning.encrypted_content"
#: How the ids of items begin.
ID_PREFIXES = {"text": "msg_", "reasoning": "rs_", "call": "fc_"}
#: Events about the text of items.
TEXT_EVENTS = {"text": "response.output_text", "reasoning": "response.reasoning_text"}
ARGUMENTS = "response.function_call_arguments"
#: An event's type and body.
TypedEvent = tuple[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ItemWriter:
    """Writes the items of one response."""

    suffix: str
    """What the ids of the response and its items have in common."""
    is_encrypted: bool
    """Whether the client keeps reasoning as `encrypted_content`, which it sends back as it is."""

    def item(self, block: Block, status: str = "") -> dict[str, Any]:
        """A block as an item: message, reasoning or function call; as far as it has grown."""
        head = {"id": self._id(block), "status": status or ("incomplete" if block.is_cut else "completed")}
        if block.call is not None:
            name = block.call.name
            call_id = block.call.id
            return {"type": "function_call", **head, "call_id": call_id, "name": name, "arguments": block.text}
        content = [part(block)] if block.text else []
        if block.kind == "text":
            return {"type": "message", **head, "role": "assistant", "content": content}
        encrypted = block.text if self.is_encrypted else None
        return {"type": "reasoning", **head, "summary": [], "content": content, "encrypted_content": encrypted}

    def events(self, changes: Iterable[BlockEvent]) -> Iterator[TypedEvent]:
        """The events of changes: an item is added, grows, or is done."""
        for change in changes:
            yield from self._events(change)

    def _events(self, change: BlockEvent) -> Iterator[TypedEvent]:
        block = change.block
        if change.what == "open":
            yield from self._added(block)
        elif change.what == "close":
            yield from self._done(block)
        elif block.kind == "call":
            yield f"{ARGUMENTS}.delta", {**self._place(block), "delta": change.text}
        else:
            yield f"{TEXT_EVENTS[block.kind]}.delta", {**self._text_place(block), "delta": change.text}

    def _added(self, block: Block) -> Iterator[TypedEvent]:
        yield "response.output_item.added", {"output_index": block.index, "item": self.item(block, "in_progress")}
        if block.kind != "call":
            yield "response.content_part.added", {**self._part_place(block), "part": part(block)}

    def _done(self, block: Block) -> Iterator[TypedEvent]:
        if block.call is not None:
            whole = {"name": block.call.name, "arguments": block.text}
            yield f"{ARGUMENTS}.done", {**self._place(block), **whole}
        else:
            yield f"{TEXT_EVENTS[block.kind]}.done", {**self._text_place(block), "text": block.text}
            yield "response.content_part.done", {**self._part_place(block), "part": part(block)}
        yield "response.output_item.done", {"output_index": block.index, "item": self.item(block)}

    def _id(self, block: Block) -> str:
        return f"{ID_PREFIXES[block.kind]}{self.suffix}{block.index:04x}"

    def _place(self, block: Block) -> dict[str, Any]:
        return {"item_id": self._id(block), "output_index": block.index}

    def _part_place(self, block: Block) -> dict[str, Any]:
        return {**self._place(block), "content_index": 0}

    def _text_place(self, block: Block) -> dict[str, Any]:
        return self._part_place(block) | ({"logprobs": []} if block.kind == "text" else {})


def part(block: Block) -> dict[str, Any]:
    """The only content part of a message or of reasoning."""
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": block.text}
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


class ResponsesWire:
    """Implements `Wire`. The streamed response and the whole one are made from the same blocks.

    - An earlier response is continued if the ledger has it, whichever wire it was given on.
    - Instructions hold for one request, and a system prompt of another wire for the whole conversation. The ids of
      responses say which of them the recorded system message was.
    """

    id_prefix = RESPONSE
    names = NAMES
    media_type = EVENTS
    request: ResponsesRequest

    def __init__(self, model: str, owner: str, ledger: Ledger | None) -> None:
        self.model = model
        self.owner = owner
        self.ledger = ledger

    def parse(self, body: bytes) -> ChatRequest:
        self.request = parse_responses(body)
        if self.request.instructions:
            self.id_prefix = INSTRUCTED
        self._tools = [{"strict": False, "type": tool.type, **tool.function} for tool in self.request.tools or ()]
        details = recorded_details(self.request, self._tools)
        return translate(self.request, self._earlier, details)

    def _earlier(self, id: str) -> list[Message]:
        """The conversation up to an earlier response. Raises ApiError."""
        if self.ledger is None:
            problem = "previous_response_id needs turns to be captured, and this server captures none (--no-capture)."
            raise ApiError(400, problem, code="previous_response_not_found", param="previous_response_id")
        try:
            messages = self.ledger.read(conversation, self.owner, id)
        except (UnknownTurn, DamagedTurn) as error:
            problem = f"The previous response {id!r} cannot be continued: {error}"
            raise ApiError(400, problem, code="previous_response_not_found", param="previous_response_id") from error
        except CaptureSuspended as error:
            raise ApiError(503, f"Earlier responses cannot be read at the moment: {error}.") from error
        messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
        return messages[1:] if id.startswith(INSTRUCTED) else messages

    async def whole(self, completion: Completion) -> bytes:
        reader = BlockReader()
        writer = self._writer(completion)
        async for update in completion:
            for _event in reader.push(update.deltas):
                pass
        for _event in reader.close(is_cut(completion)):
            pass
        return to_json(self._response(completion, [writer.item(block) for block in reader.blocks]))

    async def events(self, completion: Completion) -> AsyncIterator[bytes]:
        reader = BlockReader()
        writer = self._writer(completion)
        unknown = {"status": "in_progress", "incomplete_details": None, "usage": None}
        # Instructions and tools can be large, and the last event repeats them anyway.
        begun = self._response(completion, []) | unknown | {"instructions": None, "tools": []}
        numbers = count()

        def events(pieces: Iterable[TypedEvent]) -> bytes:
            return b"".join(
                named_event(kind, {"type": kind, "sequence_number": next(numbers), **body}) for kind, body in pieces
            )

        # The first tokens are there, so the beginning is sent with them.
        known = events([("response.created", {"response": begun}), ("response.in_progress", {"response": begun})])
        try:
            async for update in completion:
                known += events(writer.events(reader.push(update.deltas)))
                if known:
                    yield known
                known = b""
        except ApiError as error:
            failed = begun | {"status": "failed", "error": {"code": "server_error", "message": error.message}}
            yield known + events([("response.failed", {"response": failed})])
            return
        known += events(writer.events(reader.close(is_cut(completion))))
        response = self._response(completion, [writer.item(block) for block in reader.blocks])
        yield known + events([(f"response.{response['status']}", {"response": response})])

    def _writer(self, completion: Completion) -> ItemWriter:
        return ItemWriter(completion.id.removeprefix(self.id_prefix), ENCRYPTED in (self.request.include or ()))

    def _response(self, completion: Completion, output: list[dict[str, Any]]) -> dict[str, Any]:
        request = self.request
        counts = completion.usage()
        repeated = {
            **repeated_fields(request),
            "instructions": request.instructions or None,
            "tools": self._tools,
            "temperature": completion.params.temperature,
            "top_p": completion.params.top_p,
        }
        cached = counts["prompt_tokens_details"]["cached_tokens"]
        return response_body(
            completion.id,
            self.model,
            completion.created,
            output,
            repeated,
            usage_body(counts["prompt_tokens"], cached, counts["completion_tokens"]),
            is_cut=is_cut(completion),
            is_stored=completion.is_recorded,
        )


def response_body(
    id: str,
    model: str,
    created: int,
    output: list[dict[str, Any]],
    repeated: dict[str, Any],
    usage: dict[str, Any],
    *,
    is_cut: bool,
    is_stored: bool,
) -> dict[str, Any]:
    """`repeated`: the fields that repeat the request, without those that the request left out."""
    return {
        "id": id,
        "object": "response",
        "created_at": created,
        "status": "incomplete" if is_cut else "completed",
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "model": model,
        "output": output,
        "service_tier": "default",
        "store": is_stored,
        "truncation": "disabled",
        "usage": usage,
        **LEFT_OUT,
        **repeated,
    }


def repeated_fields(request: ResponsesRequest) -> dict[str, Any]:
    """The fields of a response that repeat its request and that the ledger does not have otherwise."""
    text = request.text.format if request.text else None
    return {
        "max_output_tokens": request.max_output_tokens,
        "metadata": request.metadata or {},
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": request.previous_response_id,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "text": {"format": text.model_dump(by_alias=True, exclude_unset=True) if text else {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
    }


#: The values of fields that a request left out.
LEFT_OUT = {"instructions": None, "tools": [], **repeated_fields(ResponsesRequest(input=""))}


def usage_body(prompt_tokens: int, cached_tokens: int, answer_tokens: int) -> dict[str, Any]:
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": answer_tokens,
        # Which tokens were reasoning is not counted.
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt_tokens + answer_tokens,
    }


def recorded_details(request: ResponsesRequest, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """What is recorded with the answer to a request, beyond its messages, so that it can be given again.

    `tools` are those of the request, as the response repeats them.
    """
    given = {name: value for name, value in repeated_fields(request).items() if value != LEFT_OUT[name]}
    if request.tool_choice == "none" and tools:
        # Tools that the model is not shown are no part of the recorded messages.
        given["tools"] = tools
    details = {"response": given, "encrypted": ENCRYPTED in (request.include or ())}
    return {name: value for name, value in details.items() if value}


def stored_response(turn: StoredTurn, model: str) -> dict[str, Any]:
    """The response as it was given. An answer of another wire has no fields that repeat its request."""
    is_cut = turn.finish_reason == "length"
    details = turn.details
    suffix = turn.completion.removeprefix(INSTRUCTED).removeprefix(RESPONSE)
    writer = ItemWriter(suffix, is_encrypted=details.get("encrypted", False))
    tools: list[Any] = next((message["tools"] for message in turn.messages if message["role"] == "tools"), [])
    system = next((message["content"] for message in turn.messages if message["role"] == "system"), None)
    repeated = {
        "instructions": system if turn.completion.startswith(INSTRUCTED) else None,
        "tools": [{"type": "function", "strict": False, **tool["function"]} for tool in tools],
        "temperature": turn.sampling.get("temperature"),
        "top_p": turn.sampling.get("top_p"),
        **details.get("response", {}),
    }
    return response_body(
        turn.completion,
        model,
        int(turn.created),
        [writer.item(block) for block in blocks(turn.message, details.get("order"), is_cut)],
        repeated,
        usage_body(*recorded_usage(turn)),
        is_cut=is_cut,
        is_stored=True,
    )


def recorded_usage(turn: StoredTurn) -> tuple[int, int, int]:
    """The tokens of the prompt, those of them that were cached, and those of the answer."""
    told = turn.details.get("usage", {})
    cached = turn.details.get("cached_tokens", 0)
    prompt = told.get("prompt_tokens", len(turn.prompt_ids))
    return prompt, cached, told.get("completion_tokens", len(turn.response_ids))


def blocks(message: dict[str, Any], order: list[Piece] | None, is_cut: bool) -> list[Block]:
    """An answer's reasoning, text and calls in the order in which they came."""
    reader = BlockReader()
    for _event in (*reader.push(list(deltas(message, order))), *reader.close(is_cut)):
        pass
    return reader.blocks


def deltas(message: dict[str, Any], order: list[Piece] | None) -> Iterator[Delta]:
    """The pieces of a message; without an order, reasoning, then text, then calls."""
    thoughts = message.get("reasoning_content") or ""
    content = message.get("content") or ""
    calls = iter(message.get("tool_calls") or ())
    if order is None:
        order = [("reasoning", len(thoughts)), ("text", len(content)), ("call", len(message.get("tool_calls") or ()))]
    for kind, length in order:
        if kind == "call":
            for call in islice(calls, length):
                yield ParsedToolCall(call["id"], call["function"]["name"], call["function"]["arguments"])
        elif kind == "reasoning" and length:
            yield ReasoningText(thoughts[:length])
            thoughts = thoughts[length:]
        elif length:
            yield content[:length]
            content = content[length:]


def is_cut(completion: Completion) -> bool:
    return completion.choices[0].finish_reason == "length"
