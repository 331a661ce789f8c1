"""Starts the answer to a request: as tokens that are sampled here, or as text from another API."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from openclaw_rl.api.capture.turn import Choice, OpenTurn
from openclaw_rl.api.completion import Completion, TextCompletion, TokenCompletion
from openclaw_rl.api.reader import AnswerRules, IncomingRequest, context_length_exceeded
from openclaw_rl.api.server_metrics import ServerMetrics
from openclaw_rl.api.wire import PASSED_ON, ChatRequest, TextRequest, TranslatedRequest
from openclaw_rl.engines.base import ChatCall, Sampler, TextSampler, VersionGone
from openclaw_rl.rendering.call_format import call_format
from openclaw_rl.rendering.chat import IMAGE_PART, ChatRenderer, Message, RenderedPrompt, content_text, images_in
from openclaw_rl.rendering.context import SYSTEM_ROLES
from openclaw_rl.rendering.reasoning import THINK
from openclaw_rl.rendering.response import ResponseParser
from openclaw_rl.rendering.tokenizer import read_json
from openclaw_rl.rendering.tool_calls import ToolParser
from openclaw_rl.rendering.tool_formats import FORMATS
from openclaw_rl.types import BASE_VERSION, SampleRequest, SamplingParams, TurnKind

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
#: What a model is told about the images of tools.
IMAGE_FOLLOWS = "The result is an image, which follows."
IMAGES_OF_TOOLS = "The images of the tools' results:"


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
        self._seeds = (request_seed(settings.seed, number) for number in count())

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


def request_seed(seed: int, number: int) -> int:
    """The seed of the server's n-th request. Servers with different seeds share none of them."""
    return (seed << 32) + number


class TextAnswers:
    """Answers with text of a model that is given messages. Nothing of a request is passed on but what the model needs.

    The names of sessions, the keys and the headers of clients stay here.
    """

    rules = None

    def __init__(self, sampler: TextSampler, metrics: ServerMetrics) -> None:
        self.sampler = sampler
        self.metrics = metrics

    def start(
        self,
        incoming: IncomingRequest,
        prompt: RenderedPrompt,
        turn: OpenTurn | None,
        id_prefix: str,
        version: int | None,
    ) -> Completion:
        """Give a request to the API. Raises QueueFull and EngineUnavailable."""
        if version not in (None, BASE_VERSION):
            raise VersionGone("The model behind the API has no versions here.")
        request = incoming.request
        n = request.n or 1
        stream = self.sampler.chat(ChatCall(request_body(request, prompt), n))
        params = SamplingParams(
            max_tokens=request.max_completion_tokens or request.max_tokens or 0,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=max(0, request.top_k or 0),
            seed=request.seed or 0,
        )
        choices = [Choice() for _ in range(n)]
        return TextCompletion(prompt, params, stream, choices, self.metrics, turn, incoming.arrived, id_prefix)


def request_body(request: ChatRequest, prompt: RenderedPrompt) -> dict[str, Any]:
    """A request as another API gets it: with the messages of the prompt, notes among them, and fields unknown here."""
    assert prompt.chat is not None
    known = {name: value for name in PASSED_ON if (value := getattr(request, name)) is not None}
    body = {**(request.model_extra or {}), **known}
    if isinstance(request, TranslatedRequest):
        # Only vLLM and llama.cpp know it, and no client of another wire has asked for it.
        body.pop("chat_template_kwargs", None)
    if (most := request.max_completion_tokens or request.max_tokens) is not None:
        body["max_tokens"] = most
    if isinstance(request, TextRequest):
        return body | {"prompt": request.prompt}
    body["messages"] = list(passed_messages(prompt.chat.messages))
    if request.response_format is not None:
        body["response_format"] = request.response_format.model_dump(by_alias=True, exclude_none=True)
    if not request.offered_tools:
        body.pop("parallel_tool_calls", None)
        return body
    body["tools"] = request.offered_tools
    if request.tool_choice is not None:
        choice = request.tool_choice
        body["tool_choice"] = choice if isinstance(choice, str) else choice.model_dump()
    return body


def passed_messages(messages: Sequence[Message]) -> Iterator[Message]:
    """Messages as every API accepts them. Most take images of users alone, so those of tools follow their results."""
    images: list[str] = []
    for message in messages:
        if message["role"] != "tool" and images:
            yield images_message(images)
            images = []
        if message["role"] == "tool" and (found := images_in(message.get("content"))):
            images += found
            message = {**message, "content": content_text(message["content"]) or IMAGE_FOLLOWS}
        yield passed_message(message)
    if images:
        yield images_message(images)


def images_message(images: Sequence[str]) -> Message:
    parts = [{"type": IMAGE_PART, "image_url": {"url": url}} for url in images]
    return {"role": "user", "content": [{"type": "text", "text": IMAGES_OF_TOOLS}, *parts]}


def passed_message(message: Message) -> Message:
    """A message without reasoning, and with a role that older APIs know."""
    passed = {name: value for name, value in message.items() if name != "reasoning_content"}
    passed["role"] = "system" if message["role"] in SYSTEM_ROLES else message["role"]
    return {**passed, "content": message.get("content") or ""}
