"""Answers of OpenAI's Responses API: as one response, or as a stream of events."""

from collections.abc import AsyncIterator, Iterable
from itertools import count
from typing import Any

from pydantic_core import to_json

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.api.wires.base import event
from openclaw_rl.api.wires.blocks import BlockReader
from openclaw_rl.api.wires.responses_body import INSTRUCTED, RESPONSE, repeated_fields, response_body, usage_body
from openclaw_rl.api.wires.responses_events import ItemWriter, Piece
from openclaw_rl.api.wires.responses_request import NAMES, ResponsesRequest, parse_responses, translate
from openclaw_rl.api.wires.responses_stored import ENCRYPTED, recorded_details
from openclaw_rl.ledger.errors import CaptureSuspended, UnknownTurn
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.rendering.chat import Message


class ResponsesWire:
    """Implements `Wire`. The streamed response and the whole one are made from the same blocks.

    - An earlier response is continued if the ledger has it, whichever wire it was given on.
    - Instructions hold for one request, and a system prompt of another wire for the whole conversation. The ids of
      responses say which of them the recorded system message was.
    """

    id_prefix, names = RESPONSE, NAMES
    request: ResponsesRequest

    def __init__(self, model: str, owner: str, ledger: Ledger | None) -> None:
        self.model, self.owner, self.ledger = model, owner, ledger

    def parse(self, body: bytes) -> ChatRequest:
        self.request = parse_responses(body)
        if self.request.instructions:
            self.id_prefix = INSTRUCTED
        self._tools = [{"strict": False, **tool.model_dump(exclude_none=True)} for tool in self.request.tools or ()]
        details = recorded_details(self.request, self._tools)
        return translate(self.request, self._earlier, details)

    def _earlier(self, id: str) -> list[Message]:
        """The conversation up to an earlier response. Raises ApiError."""
        if self.ledger is None:
            problem = "previous_response_id needs turns to be captured, and this server captures none (--no-capture)."
            raise ApiError(400, problem, code="previous_response_not_found", param="previous_response_id")
        try:
            messages = self.ledger.conversation(self.owner, id)
        except UnknownTurn as error:
            problem = f"The previous response {id!r} cannot be continued: {error}"
            raise ApiError(400, problem, code="previous_response_not_found", param="previous_response_id") from error
        except CaptureSuspended as error:
            raise ApiError(503, f"Earlier responses cannot be read at the moment: {error}.") from error
        messages = [{name: value for name, value in message.items() if value is not None} for message in messages]
        return messages[1:] if id.startswith(INSTRUCTED) else messages

    async def whole(self, completion: Completion) -> bytes:
        reader, writer = BlockReader(), self._writer(completion)
        async for update in completion:
            for _event in reader.push(update.deltas):
                pass
        for _event in reader.close(is_cut(completion)):
            pass
        return to_json(self._response(completion, [writer.item(block) for block in reader.blocks]))

    async def events(self, completion: Completion) -> AsyncIterator[bytes]:
        reader, writer = BlockReader(), self._writer(completion)
        unknown = {"status": "in_progress", "incomplete_details": None, "usage": None}
        # Instructions and tools can be large, and the last event repeats them anyway.
        begun = self._response(completion, []) | unknown | {"instructions": None, "tools": []}
        numbers = count()

        def events(pieces: Iterable[Piece]) -> bytes:
            return b"".join(
                event(kind, {"type": kind, "sequence_number": next(numbers), **body}) for kind, body in pieces
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
        request, counts = self.request, completion.usage()
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


def is_cut(completion: Completion) -> bool:
    return completion.choices[0].finish_reason == "length"
