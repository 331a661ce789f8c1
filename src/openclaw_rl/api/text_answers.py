"""Answers that another API gives as text: the request as it gets it, and the completion of what it sends."""

from collections.abc import Iterator, Sequence
from typing import Any

from openclaw_rl.api.capture.turn import Choice, OpenTurn
from openclaw_rl.api.completion import ChoiceUpdate, Completion
from openclaw_rl.api.reader import IncomingRequest
from openclaw_rl.api.server_metrics import ServerMetrics
from openclaw_rl.api.wire import PASSED_ON, ChatRequest, TextRequest, TranslatedRequest
from openclaw_rl.engines.base import ChatCall, TextPiece, TextSampler, TextStream, VersionGone
from openclaw_rl.rendering.chat import (
    CHARACTERS_PER_TOKEN,
    IMAGE_PART,
    Message,
    RenderedPrompt,
    content_text,
    images_in,
)
from openclaw_rl.rendering.context import SYSTEM_ROLES
from openclaw_rl.types import BASE_VERSION, SamplingParams

#: What a model is told about the images of tools.
IMAGE_FOLLOWS = "The result is an image, which follows."
IMAGES_OF_TOOLS = "The images of the tools' results:"


class TextCompletion(Completion):
    """A completion that another API gives as text. Its numbers of tokens are those of the API, or estimates."""

    _stream: TextStream

    def _tokens(self) -> tuple[int, int, int]:
        told = self._stream.usage
        written = sum(len(str(choice.message.body()["content"] or "")) for choice in self.choices)
        completion = told.get("completion_tokens", written // CHARACTERS_PER_TOKEN)
        return told.get("prompt_tokens", self.prompt.length), completion, told.get("cached_tokens", 0)

    def _read(self, batch: list[TextPiece]) -> Iterator[ChoiceUpdate]:
        for piece in batch:
            choice = self.choices[piece.index]
            for delta in piece.deltas:
                choice.message.add(delta)
            choice.finish_reason = piece.finish
            yield ChoiceUpdate(piece.index, [], list(piece.deltas), piece.finish)

    def _told_usage(self) -> dict[str, int]:
        return dict(self._stream.usage)


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
