"""One chat completion from request to last token, independent of how it is sent to the client.

`ChatService.begin` turns a request into a running `Completion` (or refuses it); iterating over that gives updates
as they become certain, and afterwards it knows what was sampled, token for token.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from openclaw_rl.api.capture import Answer, Capture, Incoming, OpenTurn
from openclaw_rl.api.errors import ApiError, from_engine
from openclaw_rl.api.message import AssistantMessage
from openclaw_rl.api.metrics import Metrics
from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.engines.base import EngineUnavailable, QueueFull, Sampler, SampleStream
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Prompt
from openclaw_rl.rendering.history import Conversation
from openclaw_rl.rendering.response import Delta, ResponseParser
from openclaw_rl.rendering.tokenizer import read_json
from openclaw_rl.rendering.tool_calls import PARSERS, choose_parser
from openclaw_rl.types import FinishReason, SampledToken, SampleRequest, SamplingParams, TurnKind

log = logging.getLogger(__name__)

#: Larger values of top_k mean the same, and do not fit where they are counted.
MAX_TOP_K = 2**31 - 1
#: Tokenising more text than this would keep other requests' tokens waiting, so it is done in a thread.
INLINE_CHARACTERS = 20_000
#: What a generation config calls the parameters that a request may leave out, and what they are called here.
IN_GENERATION_CONFIG = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What a request gets that does not say otherwise: the model's own generation config."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    """None: all that the context leaves."""

    def for_model(self, folder: Path) -> "SamplingDefaults":
        """What the folder says; for what it does not name, these."""
        given = read_json(folder / "generation_config.json")
        for key in ("repetition_penalty", "min_p"):
            if given.get(key) not in (None, 0, 1):
                log.warning("The model's generation config asks for %s, which is not supported.", key)
        named = {name: given[key] for key, name in IN_GENERATION_CONFIG.items() if given.get(key) is not None}
        return replace(self, **named)


@dataclass(frozen=True, slots=True)
class Update:
    """News of one choice: tokens that were sampled, what became readable with them, and perhaps the end."""

    index: int
    tokens: list[SampledToken]
    deltas: list[Delta]
    finish_reason: str | None = None


@dataclass(slots=True)
class Choice:
    """One of the n completions while it is being read."""

    parser: ResponseParser
    message: AssistantMessage = field(default_factory=AssistantMessage)
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: str | None = None


class Completion:
    """A request that is being answered. Await `ready`, then iterate once; leaving early stops the generation."""

    def __init__(
        self,
        prompt: Prompt,
        params: SamplingParams,
        stream: SampleStream,
        choices: list[Choice],
        metrics: Metrics,
        turn: OpenTurn | None,
        arrived: float,
    ) -> None:
        self.id = f"chatcmpl-{uuid4().hex}"
        self.created = int(time.time())
        self.prompt, self.params, self.choices = prompt, params, choices
        self._stream, self._metrics, self._turn = stream, metrics, turn
        self._arrived = arrived
        self._batches = aiter(stream)
        self._first: list[SampledToken] | None = None

    @property
    def version(self) -> int:
        """The policy version that answers."""
        return self._stream.version

    def usage(self) -> dict[str, Any]:
        prompt, completion = len(self.prompt.ids), sum(len(choice.tokens) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self._stream.cached_tokens},
        }

    async def ready(self) -> None:
        """Wait for the first tokens. Raises ApiError if there will be none, while that can still be a status."""
        try:
            self._first = await anext(self._batches, None)
            self._metrics.first_token.observe(time.perf_counter() - self._arrived)
        except EngineUnavailable as error:
            self._end("failed")
            raise from_engine(error) from error
        except asyncio.CancelledError:
            self._end("cancelled")
            raise

    async def __aiter__(self) -> AsyncIterator[Update]:
        status = "cancelled"
        try:
            tokens = self._first
            while tokens is not None:
                updates = list(self._read(tokens))
                if all(choice.finish_reason for choice in self.choices):
                    # Whoever has the last piece of an answer can rely on it being in the ledger.
                    await self._record()
                    status = "ok"
                for update in updates:
                    yield update
                tokens = await anext(self._batches, None)
        except EngineUnavailable as error:
            status = "failed"
            raise from_engine(error) from error
        finally:
            self._end(status)

    def _end(self, status: str) -> None:
        self._stream.close()
        if self._turn is not None:
            self._turn.close()
        self._count(status)

    def _read(self, tokens: list[SampledToken]) -> Iterator[Update]:
        for index, choice in enumerate(self.choices):
            if choice.finish_reason is None:
                own = [token for token in tokens if token.index == index]
                if own:
                    yield self._advance(index, choice, own)

    def _advance(self, index: int, choice: Choice, tokens: list[SampledToken]) -> Update:
        taken, deltas = choice.parser.push(token.token_id for token in tokens)
        tokens = tokens[:taken]
        choice.tokens += tokens
        if tokens[-1].finish is not None or choice.parser.stopped:
            deltas += choice.parser.flush()
            choice.finish_reason = finish_reason(choice, tokens[-1].finish)
            self._stream.drop(index)
        for delta in deltas:
            choice.message.add(delta)
        return Update(index, tokens, deltas, choice.finish_reason)

    async def _record(self) -> None:
        if self._turn is not None:
            answers = [
                Answer(choice.tokens, choice.message.body(), str(choice.finish_reason)) for choice in self.choices
            ]
            await self._turn.record(self.id, self.version, self.params, answers)

    def close(self) -> None:
        """Stop the generation; iteration ends."""
        self._stream.close()

    def _count(self, status: str) -> None:
        usage = self.usage()
        self._metrics.requests[status].inc()
        self._metrics.prompt_tokens.inc(usage["prompt_tokens"])
        self._metrics.cached_tokens.inc(usage["prompt_tokens_details"]["cached_tokens"])
        self._metrics.completion_tokens.inc(usage["completion_tokens"])
        self._metrics.duration.observe(time.perf_counter() - self._arrived)


def finish_reason(choice: Choice, engine: FinishReason | None) -> str:
    """Why a choice ended, in OpenAI's words."""
    if engine is FinishReason.LENGTH and not choice.parser.stopped:
        return "length"
    return "tool_calls" if choice.parser.called_tools else "stop"


class ChatService:
    """Answers chat requests with one model."""

    def __init__(
        self,
        sampler: Sampler,
        renderer: ChatRenderer,
        defaults: SamplingDefaults,
        *,
        tool_parser: str = "auto",
        seed: int = 0,
        ledger: Ledger | None = None,
        recorded_top: int = 0,
    ) -> None:
        """`recorded_top` of the likeliest tokens at each place are recorded with a turn."""
        self.sampler, self.renderer, self.defaults = sampler, renderer, defaults
        self.recorded_top = recorded_top
        self.metrics = Metrics(sampler.stats)
        self.capture = Capture(ledger, renderer, self.metrics) if ledger else None
        self._parser = choose_parser(renderer.template) if tool_parser == "auto" else tool_parser
        # Requests without a seed of their own draw from streams that follow from the server's seed.
        self._seeds = (request_seed(seed, number) for number in count())

    async def begin(self, request: ChatRequest, owner: str, headers: Mapping[str, str]) -> Completion:
        """Render the request and hand it to the engine. Raises ApiError."""
        arrived = time.perf_counter()
        messages = [message.model_dump(exclude_none=True) for message in request.messages]
        conversation = Conversation(messages, request.offered_tools, request.chat_template_kwargs)
        prompt = await self._prompt(conversation)
        context = self.sampler.limits.max_context_tokens
        incoming = Incoming(owner, headers, request, conversation, prompt, context)
        turn = self.capture.open(incoming) if self.capture else None
        try:
            return self._start(request, turn.prompt if turn else prompt, turn, arrived)
        except (QueueFull, EngineUnavailable, ApiError) as error:
            if turn is not None:
                turn.close()
            raise error if isinstance(error, ApiError) else from_engine(error) from error

    def _start(self, request: ChatRequest, prompt: Prompt, turn: OpenTurn | None, arrived: float) -> Completion:
        recorded = self.recorded_top if turn and turn.kind is TurnKind.MAIN else 0
        params = self._params(request, len(prompt.ids), recorded)
        n = request.n or 1
        if n > self.sampler.limits.max_choices:
            raise ApiError(400, f"n must be at most {self.sampler.limits.max_choices} on this server.", param="n")
        stream = self.sampler.sample(SampleRequest(prompt.ids, params, n))
        choices = [Choice(self._response_parser(request, prompt)) for _ in range(n)]
        return Completion(prompt, params, stream, choices, self.metrics, turn, arrived)

    def capture_status(self) -> str:
        """Whether turns are recorded: on, off, or suspended and why."""
        if self.capture is None:
            return "off"
        reason = self.capture.ledger.writer.suspended
        return "on" if reason is None else f"suspended: {reason}"

    async def _prompt(self, conversation: Conversation) -> Prompt:
        try:
            text = self.renderer.text(*conversation)
        except ChatError as error:
            raise ApiError(400, str(error), param="messages") from error
        if self.renderer.tokenizer.unseen(text) > INLINE_CHARACTERS:
            return await asyncio.to_thread(self.renderer.prompt, text)
        return self.renderer.prompt(text)

    def _params(self, request: ChatRequest, prompt_tokens: int, recorded_top: int) -> SamplingParams:
        limit = self.sampler.limits.max_context_tokens
        room = limit - prompt_tokens
        if room < 1:
            raise ApiError(
                400,
                f"The conversation has {prompt_tokens} tokens; this model's limit is {limit}, answer included.",
                code="context_length_exceeded",
                param="messages",
            )
        defaults = self.defaults
        wanted = request.max_completion_tokens or request.max_tokens or defaults.max_tokens or room
        return SamplingParams(
            max_tokens=min(wanted, room),
            temperature=defaults.temperature if request.temperature is None else request.temperature,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            top_k=min(MAX_TOP_K, max(0, defaults.top_k if request.top_k is None else request.top_k)),
            seed=next(self._seeds) if request.seed is None else request.seed,
            stop_token_ids=self.renderer.tokenizer.eos_ids,
            top_logprobs=max(request.top_logprobs or 0, recorded_top),
        )

    def _response_parser(self, request: ChatRequest, prompt: Prompt) -> ResponseParser:
        parser = PARSERS[self._parser]() if request.offered_tools else None
        return ResponseParser(self.renderer.detokenizer, request.stops, prompt.opens_reasoning, parser)


def request_seed(seed: int, number: int) -> int:
    """A seed for the server's n-th request; different server seeds share none of them."""
    return (seed << 32) + number
