"""Ollama's own API: chats and prompts as chat requests, and answers as one object or as lines of JSON."""

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic_core import to_json

from openclaw_rl.api.completion import Completion
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import MAX_TEMPERATURE, CaptureFields, ChatRequest, ListOf, Tool, WireModel, parse
from openclaw_rl.api.wires.base import chat_request, image_part, refuse_fields, same_fields, with_images
from openclaw_rl.rendering.response import Delta, ReasoningText
from openclaw_rl.rendering.tool_calls import ParsedToolCall

#: Ollama's names of the chat fields that can be at fault.
NAMES: Mapping[str, str] = {"max_completion_tokens": "options.num_predict", "response_format": "format"}
#: Fields that are refused, and what to do instead.
REFUSED = {
    "raw": "send the prompt to /v1/completions",
    "template": "leave it out",
    "suffix": "leave it out",
    "context": "send the conversation to /api/chat",
}
#: The tag that clients add to a model's name.
LATEST = ":latest"
#: How images of each kind begin in base64.
IMAGE_TYPES = {"/9j/": "jpeg", "R0lG": "gif", "UklG": "webp"}


class OllamaFunction(WireModel):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaCall(WireModel):
    function: OllamaFunction


class OllamaMessage(WireModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: ListOf[str] | None = None
    tool_calls: ListOf[OllamaCall] | None = None
    tool_name: str | None = None


class OllamaOptions(WireModel):
    model_config = ConfigDict(strict=True)

    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    num_predict: int | None = None
    """Negative numbers mean no limit."""


class OllamaRequest(CaptureFields):
    """What both requests have."""

    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: OllamaOptions | None = None
    think: bool | str | None = None


class OllamaChat(OllamaRequest):
    """The body of POST /api/chat."""

    messages: ListOf[OllamaMessage] = Field(min_length=1)
    tools: ListOf[Tool] | None = None


class OllamaPrompt(OllamaRequest):
    """The body of POST /api/generate."""

    prompt: str = Field(min_length=1)
    system: str | None = None
    images: ListOf[str] | None = None
    raw: Any = None
    template: Any = None
    suffix: Any = None
    context: Any = None


class OllamaName(WireModel):
    """The body of POST /api/show; older clients say `name`."""

    model: str = ""
    name: str = ""

    @property
    def given(self) -> str:
        return (self.model or self.name).removesuffix(LATEST)


def translate(request: OllamaRequest, messages: list[dict[str, Any]], tools: list[Tool] | None) -> ChatRequest:
    """The chat request. Raises ApiError."""
    options = request.options or OllamaOptions()
    most = options.num_predict
    think = request.think
    return chat_request(
        **same_fields(request) | {"model": request.model.removesuffix(LATEST)},
        **{name: getattr(options, name) for name in ("temperature", "top_p", "top_k", "seed", "stop")},
        messages=messages,
        # Ollama streams unless it is told not to.
        stream=request.stream is not False,
        tools=tools,
        max_completion_tokens=most if most and most > 0 else None,
        response_format=response_format(request.format),
        chat_template_kwargs={"enable_thinking": bool(think)} if think is not None else None,
        reasoning_effort=think if isinstance(think, str) else None,
    )


def response_format(form: Any) -> dict[str, Any] | None:
    if not form:
        return None
    if form == "json":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": form, "strict": True}}


def chat_messages(given: list[OllamaMessage]) -> Iterator[dict[str, Any]]:
    """The messages of a chat. Ollama's calls have no ids: results belong to the calls before them, in order."""
    pending: list[tuple[str, str]] = []
    number = 0
    for message in given:
        images = [image_part(image_url(image)) for image in message.images or ()]
        content = with_images(message.content, images)
        if message.role == "tool":
            place = next((i for i, (_id, name) in enumerate(pending) if name == message.tool_name), 0)
            id = pending.pop(place)[0] if pending else ""
            yield {"role": "tool", "tool_call_id": id, "content": content}
            continue
        chat: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            chat["reasoning_content"] = message.thinking
        if message.tool_calls:
            pending = []
            for call in message.tool_calls:
                pending.append((f"call{number}", call.function.name))
                number += 1
            calls = zip(pending, message.tool_calls, strict=True)
            chat["tool_calls"] = [chat_call(id, call.function) for (id, _name), call in calls]
        yield chat


def chat_call(id: str, function: OllamaFunction) -> dict[str, Any]:
    written = {"name": function.name, "arguments": json.dumps(function.arguments, ensure_ascii=False)}
    return {"id": id, "type": "function", "function": written}


def image_url(data: str) -> str:
    return f"data:image/{IMAGE_TYPES.get(data[:4], 'png')};base64,{data}"


class OllamaWire:
    """Implements `Wire`. The lines of a stream and the whole answer are made from the same deltas."""

    id_prefix = "chatcmpl-"
    names = NAMES
    media_type = "application/x-ndjson"

    def __init__(self, model: str, *, is_chat: bool) -> None:
        """`is_chat`: /api/chat; otherwise /api/generate."""
        self.model = model
        self.is_chat = is_chat
        self._began = time.perf_counter_ns()

    def parse(self, body: bytes) -> ChatRequest:
        if self.is_chat:
            chat = parse(OllamaChat, body)
            return translate(chat, list(chat_messages(chat.messages)), chat.tools)
        request = parse(OllamaPrompt, body)
        refuse_fields(request, REFUSED)
        images = [image_part(image_url(image)) for image in request.images or ()]
        system = [{"role": "system", "content": request.system}] if request.system else []
        question = {"role": "user", "content": with_images(request.prompt, images)}
        return translate(request, [*system, question], None)

    async def whole(self, completion: Completion) -> bytes:
        deltas: list[Delta] = []
        async for update in completion:
            deltas += update.deltas
        return to_json({**self._head(completion), **self._part(deltas), **self._end(completion)})

    async def events(self, completion: Completion) -> AsyncIterator[bytes]:
        head = self._head(completion)
        try:
            async for update in completion:
                if update.deltas:
                    yield to_json({**head, **self._part(update.deltas), "done": False}) + b"\n"
        except ApiError as error:
            yield to_json(error.ollama_body()) + b"\n"
            return
        yield to_json({**head, **self._part([]), **self._end(completion)}) + b"\n"

    def _head(self, completion: Completion) -> dict[str, Any]:
        created = datetime.fromtimestamp(completion.created, UTC).isoformat()
        return {"id": completion.id, "model": self.model, "created_at": created}

    def _part(self, deltas: list[Delta]) -> dict[str, Any]:
        text = "".join(delta for delta in deltas if isinstance(delta, str))
        thinking = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningText))
        calls = [delta for delta in deltas if isinstance(delta, ParsedToolCall)]
        thought = {"thinking": thinking} if thinking else {}
        if not self.is_chat:
            return {"response": text, **thought}
        functions = [{"function": {"name": call.name, "arguments": json.loads(call.arguments)}} for call in calls]
        called = {"tool_calls": functions} if calls else {}
        return {"message": {"role": "assistant", "content": text, **thought, **called}}

    def _end(self, completion: Completion) -> dict[str, Any]:
        counts = completion.usage()
        nanoseconds = time.perf_counter_ns() - self._began
        reason = completion.choices[0].finish_reason
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            "total_duration": nanoseconds,
            "load_duration": 0,
            "prompt_eval_count": counts["prompt_tokens"],
            "prompt_eval_duration": 0,
            "eval_count": counts["completion_tokens"],
            "eval_duration": nanoseconds,
        }
