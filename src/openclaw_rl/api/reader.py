"""From the body of a chat request to its prompt: parsing, rendering, tokenising."""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from openclaw_rl.api.body import MAX_SMALL_BODY_BYTES, MAX_VALUES, count_values, most_values
from openclaw_rl.api.constrain import AnswerRules
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.translated import TextRequest
from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.engines.base import Sampler
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, RenderedPrompt
from openclaw_rl.rendering.history import TemplateInput
from openclaw_rl.rendering.tokenizer import TooLong
from openclaw_rl.types import Constraint

#: Larger bodies are read in a thread, so that other requests do not wait.
MAX_INLINE_BYTES = 16_384
#: So are bodies with this field: they stand for a whole conversation, which is in the ledger.
REFERS_BACK = b"previous_response_id"
#: A body with more bytes for each token of the context does not fit: tokens have up to a hundred bytes, and JSON may
#: write each of them with six.
MAX_BYTES_PER_TOKEN = 512
#: A prompt with more tokens than this many contexts is refused before it has been tokenised to the end.
MAX_CONTEXTS = 2


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """A chat request and its prompt."""

    request: ChatRequest
    chat: TemplateInput
    prompt: RenderedPrompt
    """The chat as the client sent it, rendered."""
    arrived: float
    """When its body had arrived, as `time.perf_counter` counts."""
    constraint: Constraint | None = None
    """What its answers must look like, without regard to reasoning; None if they are free."""


class RequestReader:
    """Reads chat requests for one model.

    - While one is read, others are served, whatever its body contains: no part of the work that stops other threads
      grows with the request. (`benchmarks/freeze.py` measures it.)
    - A request that cannot fit into the context is refused before it is tokenised to the end.
    - Requests of a megabyte and more are read one at a time, and delay no smaller ones.
    """

    def __init__(self, renderer: ChatRenderer, sampler: Sampler, rules: AnswerRules) -> None:
        self.renderer, self.sampler, self.rules = renderer, sampler, rules
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="read")
        self._thread_for_large = ThreadPoolExecutor(1, thread_name_prefix="read-large")

    async def read(self, body: bytes, parse: Callable[[bytes], ChatRequest]) -> ReadRequest:
        """Read a request, which `parse` translates into a chat request. Raises ApiError."""
        arrived = time.perf_counter()
        if len(body) <= MAX_INLINE_BYTES and REFERS_BACK not in body:
            return self._read(body, parse, arrived)
        threads = self._threads if len(body) <= MAX_SMALL_BODY_BYTES else self._thread_for_large
        return await asyncio.get_running_loop().run_in_executor(threads, self._read, body, parse, arrived)

    def _read(self, body: bytes, parse: Callable[[bytes], ChatRequest], arrived: float) -> ReadRequest:
        limit = self.sampler.limits.max_context_tokens
        if len(body) > max(MAX_SMALL_BODY_BYTES, MAX_BYTES_PER_TOKEN * limit):
            raise far_too_long(limit)
        check_values([body])
        request = parse(body)
        messages = request.plain_messages()
        calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        if calls:
            check_values([body, *(utf8(call["arguments"]) for call in calls)])
        chat = TemplateInput(messages, request.offered_tools, request.chat_template_kwargs)
        try:
            if isinstance(request, TextRequest):
                prompt = self.renderer.plain_prompt(request.prompt, MAX_CONTEXTS * limit)
            else:
                prompt = self.renderer.prompt(self.renderer.text(*chat), MAX_CONTEXTS * limit)
        except ChatError as error:
            raise ApiError(400, str(error), param="messages") from error
        except TooLong:
            raise far_too_long(limit) from None
        return ReadRequest(request, chat, prompt, arrived, self.rules.constraint(request))


def context_length_exceeded(tokens: int | str, limit: int) -> ApiError:
    return ApiError(
        400,
        f"The conversation has {tokens} tokens; this model's limit is {limit}, answer included.",
        code="context_length_exceeded",
        param="messages",
    )


def far_too_long(limit: int) -> ApiError:
    return context_length_exceeded(f"more than {MAX_CONTEXTS * limit}", limit)


def utf8(text: str) -> bytes:
    """Also for halves of surrogate pairs, which JSON can contain."""
    return text.encode("utf-8", "surrogatepass")


def check_values(texts: Sequence[bytes]) -> None:
    """Raise ApiError if these texts have too many JSON values together."""
    if sum(map(most_values, texts)) > MAX_VALUES and sum(map(count_values, texts)) > MAX_VALUES:
        raise ApiError(400, f"The request has more than {MAX_VALUES} JSON values.", code="too_many_values")
