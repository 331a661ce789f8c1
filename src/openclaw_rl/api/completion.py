"""One answer from its request to its last token. It does not depend on the format that the client receives."""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from secrets import token_hex
from typing import Any

import numpy as np

from openclaw_rl.api.capture.turn import Choice, OpenTurn
from openclaw_rl.api.errors import from_engine
from openclaw_rl.api.reader import AnswerRules, IncomingRequest, context_length_exceeded
from openclaw_rl.api.server_metrics import ServerMetrics
from openclaw_rl.api.wire import ChatRequest, TextRequest
from openclaw_rl.engines.base import EngineUnavailable, Sampler, SampleStream, TextStream
from openclaw_rl.rendering.call_format import call_format
from openclaw_rl.rendering.chat import ChatRenderer, RenderedPrompt
from openclaw_rl.rendering.response import THINK, Delta, ResponseParser
from openclaw_rl.rendering.tokenizer import read_json
from openclaw_rl.rendering.tool_calls import ToolParser
from openclaw_rl.rendering.tool_formats import FORMATS
from openclaw_rl.types import FinishReason, SampledToken, SampleRequest, SamplingParams, TurnKind

log = logging.getLogger(__name__)

#: Larger values of top_k mean the same, and would overflow a 32-bit integer.
MAX_TOP_K = 2**31 - 1
#: Sampling parameters by their name in a generation config.
GENERATION_CONFIG_FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_new_tokens": "max_tokens",
}
#: The longest passage that is looked for, in tokens.
LONGEST_PASSAGE = 150
#: For each length of a passage, how many repeated tokens make a loop: it stands there three times, or more often if it
#: is short, because tables, matrices and songs repeat short passages too. Of 300 answers of the embedded model, 22
#: repeated themselves, and all of these went on and on.
LOOP_TOKENS = np.maximum(50, 2 * np.arange(1, LONGEST_PASSAGE + 1))


@dataclass(frozen=True, slots=True)
class ChoiceUpdate:
    """New tokens of one choice, the text that became certain with them, and the finish reason if it has ended."""

    index: int
    tokens: list[SampledToken]
    deltas: list[Delta]
    finish_reason: str | None = None


class LoopWatch:
    """Tells when a completion has repeated one passage again and again, as small models do until they are stopped."""

    def __init__(self) -> None:
        self._recent = np.full(LONGEST_PASSAGE, -1)
        """The tokens so far, the newest first."""
        self._repeated = np.zeros(LONGEST_PASSAGE, int)
        """For each length of a passage, how many tokens in a row equal the one so far back."""

    def push(self, token_id: int) -> bool:
        """Add a token; whether it completes a loop."""
        self._repeated = (self._repeated + 1) * (self._recent == token_id)
        self._recent = np.concatenate(([token_id], self._recent[:-1]))
        return bool((self._repeated >= LOOP_TOKENS).any())


class Completion(ABC):
    """A request that is being answered. Await `ready`, then iterate once.

    - The last update is yielded only after the turn has been stored, or storing it has failed.
    - Leaving the iteration early, or `close`, stops the generation.
    - Each request is counted once in the metrics, however it ends.
    """

    def __init__(
        self,
        prompt: RenderedPrompt,
        params: SamplingParams,
        stream: SampleStream | TextStream,
        choices: list[Choice],
        metrics: ServerMetrics,
        turn: OpenTurn | None,
        arrived: float,
        id_prefix: str,
    ) -> None:
        self.id = id_prefix + token_hex(16)
        self._began = time.time()
        self.prompt = prompt
        self.params = params
        self.choices = choices
        self._stream = stream
        self._metrics = metrics
        self._turn = turn
        self._arrived = arrived
        self._batches: AsyncIterator[list[Any]] = aiter(stream)
        self._first: list[Any] | None = None

    @property
    def version(self) -> int:
        """The policy version that answers."""
        return self._stream.version

    @property
    def created(self) -> int:
        """When the answer began, in seconds since 1970."""
        return int(self._began)

    @property
    def is_recorded(self) -> bool:
        """Whether the turn is recorded once it is answered."""
        return self._turn is not None

    def head(self, kind: str, model: str) -> dict[str, Any]:
        """How OpenAI's older wires begin an answer, and each of its chunks."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": model,
            "system_fingerprint": f"policy-{self.version}",
        }

    def usage(self) -> dict[str, Any]:
        """OpenAI's numbers of tokens; whole when the answer is."""
        prompt, completion, cached = self._tokens()
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    @abstractmethod
    def _tokens(self) -> tuple[int, int, int]:
        """The tokens of the prompt, of all answers, and those of the prompt that were cached."""

    @abstractmethod
    def _read(self, batch: list[Any]) -> Iterator[ChoiceUpdate]:
        """What has become of the choices that a batch is about."""

    async def ready(self) -> None:
        """Wait for the first tokens. Raises ApiError if there will be none, while an HTTP status can still be sent."""
        try:
            self._first = await anext(self._batches, None)
            seconds = time.perf_counter() - self._arrived
            self._metrics.first_token.observe(seconds)
            self._metrics.recent.add_first_token(seconds)
        except EngineUnavailable as error:
            self._end("failed")
            raise from_engine(error) from error
        except asyncio.CancelledError:
            self._end("cancelled")
            raise

    async def __aiter__(self) -> AsyncIterator[ChoiceUpdate]:
        status = "cancelled"
        try:
            batch = self._first
            while batch is not None:
                updates = list(self._read(batch))
                if all(choice.finish_reason for choice in self.choices):
                    # A client that has received the last piece of an answer can rely on the ledger to have the turn.
                    await self._record()
                    status = "ok"
                for update in updates:
                    yield update
                batch = await anext(self._batches, None)
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

    async def _record(self) -> None:
        turn = self._turn
        if turn is not None:
            await turn.record(
                turn.answered(
                    index,
                    choice,
                    completion=self.id,
                    created=self._began,
                    version=self.version,
                    sampling=self.params,
                    cached_tokens=self._tokens()[2],
                    usage=self._told_usage(),
                )
                for index, choice in enumerate(self.choices)
            )

    def _told_usage(self) -> dict[str, int]:
        """The numbers of tokens that another API gave."""
        return {}

    def close(self) -> None:
        """Stop the generation. The iteration ends."""
        self._stream.close()

    def _count(self, status: str) -> None:
        usage = self.usage()
        self._metrics.requests[status].inc()
        self._metrics.recent.add_request()
        self._metrics.prompt_tokens.inc(usage["prompt_tokens"])
        self._metrics.cached_tokens.inc(usage["prompt_tokens_details"]["cached_tokens"])
        self._metrics.completion_tokens.inc(usage["completion_tokens"])
        self._metrics.duration.observe(time.perf_counter() - self._arrived)


class TokenCompletion(Completion):
    """A completion whose tokens are sampled here.

    With `stops_loops`, a choice that repeats itself ends there, as if it had reached its limit.
    """

    _stream: SampleStream

    def __init__(self, *arguments: Any, stops_loops: bool = False) -> None:
        super().__init__(*arguments)
        self._loops = [LoopWatch() for _ in self.choices] if stops_loops else []

    def _tokens(self) -> tuple[int, int, int]:
        completion = sum(len(choice.tokens) for choice in self.choices)
        return len(self.prompt.ids), completion, self._stream.cached_tokens

    def _read(self, tokens: list[SampledToken]) -> Iterator[ChoiceUpdate]:
        for index, choice in enumerate(self.choices):
            if choice.finish_reason is None:
                new_tokens = [token for token in tokens if token.index == index]
                if new_tokens:
                    yield self._advance(index, choice, new_tokens)

    def _advance(self, index: int, choice: Choice, tokens: list[SampledToken]) -> ChoiceUpdate:
        assert choice.parser is not None
        loop = self._end_of_loop(index, tokens)
        taken, deltas = choice.parser.push([token.token_id for token in tokens[:loop]])
        tokens = tokens[:taken]
        choice.tokens += tokens
        self._metrics.recent.add_tokens(len(tokens))
        if loop is not None or tokens[-1].finish is not None or choice.parser.stopped:
            deltas += choice.parser.flush()
            choice.finish_reason = finish_reason(choice, tokens[-1].finish or FinishReason.LENGTH)
            self._stream.drop(index)
        for delta in deltas:
            choice.message.add(delta)
        return ChoiceUpdate(index, tokens, deltas, choice.finish_reason)

    def _end_of_loop(self, index: int, tokens: list[SampledToken]) -> int | None:
        """How many of the new tokens there are up to the one that completes a loop, if one does."""
        if not self._loops:
            return None
        watch = self._loops[index]
        return next((place for place, token in enumerate(tokens, start=1) if watch.push(token.token_id)), None)


def finish_reason(choice: Choice, engine: FinishReason | None) -> str:
    """OpenAI's name for why a choice ended."""
    assert choice.parser is not None
    if engine is FinishReason.LENGTH and not choice.parser.stopped:
        return "length"
    return "tool_calls" if choice.parser.called_tools else "stop"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Sampling parameters for what a request leaves out."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int | None = None
    """None: as many as the context has room for."""
    stops_loops: bool = False
    """Whether an answer without a limit and a format ends when it repeats itself."""

    def for_model(self, folder: Path) -> "SamplingDefaults":
        """The values of the model's generation config; for those that it does not name, these."""
        config = read_json(folder / "generation_config.json")
        for key in ("repetition_penalty", "min_p"):
            if config.get(key) not in (None, 0, 1):
                log.warning("The model's generation config asks for %s, which is not supported.", key)
        values = {name: config[key] for key, name in GENERATION_CONFIG_FIELDS.items() if config.get(key) is not None}
        return replace(self, **values)


@dataclass(frozen=True, slots=True)
class TokenSettings:
    """How tokens are sampled and read where a request does not say."""

    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    tool_parser: str = "auto"
    seed: int = 0
    recorded_top: int = 0
    """How many of the likeliest tokens are recorded with each token of a main turn."""


class TokenAnswers:
    """Answers with tokens that a sampler draws.

    A request without a seed gets one that follows from the server's seed and the number of the request.
    """

    def __init__(
        self, sampler: Sampler, renderer: ChatRenderer, metrics: ServerMetrics, settings: TokenSettings
    ) -> None:
        self.sampler = sampler
        self.renderer = renderer
        self.metrics = metrics
        self.settings = settings
        parser = renderer.tool_format if settings.tool_parser == "auto" else settings.tool_parser
        self._tool_format = FORMATS[parser]
        self._detokenizer = renderer.detokenizer.showing(renderer.reasoning.markers)
        self._detokenizer_for_calls = self._detokenizer.showing(self._tool_format.all_markers)
        thinks = renderer.reasoning is THINK and THINK.opening in renderer.template.text
        constrains = sampler.capabilities.constrains
        before_content = renderer.reasoning.before_content
        self.rules = AnswerRules(call_format(renderer, parser), thinks, constrains, before_content)
        # Servers with different seeds share none of these.
        self._seeds = count(settings.seed << 32)

    def start(
        self,
        incoming: IncomingRequest,
        prompt: RenderedPrompt,
        turn: OpenTurn | None,
        id_prefix: str,
        version: int | None,
    ) -> Completion:
        """Give a request to the sampler. Raises ApiError, QueueFull and EngineUnavailable."""
        request = incoming.request
        constraint = incoming.constraint and self.rules.for_prompt(incoming.constraint, prompt)
        recorded_top = self.settings.recorded_top if turn and turn.kind is TurnKind.MAIN else 0
        params = self._params(request, len(prompt.ids), recorded_top)
        n = request.n or 1
        sampled = SampleRequest(
            prompt.ids, params, n, version=version, owner=incoming.owner, constraint=constraint, line=incoming.line
        )
        stream = self.sampler.sample(sampled)
        choices = [Choice(self._response_parser(request, prompt)) for _ in range(n)]
        bounded = request.max_completion_tokens or request.max_tokens or constraint
        stops_loops = self.settings.defaults.stops_loops and not bounded
        return TokenCompletion(
            prompt, params, stream, choices, self.metrics, turn, incoming.arrived, id_prefix, stops_loops=stops_loops
        )

    def _params(self, request: ChatRequest, prompt_tokens: int, recorded_top: int) -> SamplingParams:
        limit = self.sampler.limits.max_context_tokens
        room = limit - prompt_tokens
        if room < 1:
            raise context_length_exceeded(prompt_tokens, limit)
        defaults = self.settings.defaults
        max_tokens = request.max_completion_tokens or request.max_tokens or defaults.max_tokens or room
        return SamplingParams(
            max_tokens=min(max_tokens, room),
            temperature=defaults.temperature if request.temperature is None else request.temperature,
            top_p=defaults.top_p if request.top_p is None else request.top_p,
            top_k=min(MAX_TOP_K, max(0, defaults.top_k if request.top_k is None else request.top_k)),
            seed=next(self._seeds) if request.seed is None else request.seed,
            stop_token_ids=self.renderer.tokenizer.eos_ids,
            top_logprobs=max(request.top_logprobs or 0, recorded_top),
        )

    def _response_parser(self, request: ChatRequest, prompt: RenderedPrompt) -> ResponseParser:
        if isinstance(request, TextRequest):
            return ResponseParser(self.renderer.detokenizer, request.stops, reasoning=None)
        tools = request.offered_tools
        return ResponseParser(
            self._detokenizer_for_calls if tools else self._detokenizer,
            request.stops,
            prompt.opens_reasoning,
            ToolParser(self._tool_format, tools) if tools else None,
            reasoning=self.renderer.reasoning,
            one_call=request.parallel_tool_calls is False,
        )
