"""Reads requests: how large bodies may be, a chat request's prompt, and what it demands of its answer."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from fastapi import Request

from openclaw_rl.api.capture.classify import NamedSession, episode_of, named_session
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import ChatRequest, JsonSchemaFormat, NamedTool, TextRequest, check_supported
from openclaw_rl.engines.base import Sampler
from openclaw_rl.rendering.chat import ChatError, Message, RenderedPrompt, Renderer, TemplateInput
from openclaw_rl.rendering.known import Known, KnownMessages, KnownTools, separators
from openclaw_rl.rendering.tokenizer import TooLong
from openclaw_rl.rendering.tool_formats import CallFormat
from openclaw_rl.types import SHARED, Constraint, EpisodeMode, JsonForm, Thinking

T = TypeVar("T")

#: The largest schema, as JSON, and how deeply it may be nested. The engine bounds what a schema of this size may cost.
MAX_SCHEMA_BYTES = 100_000
MAX_SCHEMA_DEPTH = 60
ANY_OBJECT = '{"type": "object"}'


class AnswerRules:
    """Reads what requests demand, for one model.

    - A demand that cannot be met is refused with a 400 that names the field.
    - Tool calls have the format in which the model's template writes them.
    """

    def __init__(self, calls: CallFormat | None, thinks: bool, constrains: bool, before_content: str) -> None:
        """`calls`: None if they are not written as JSON. `thinks`: whether the model may begin with reasoning.

        `constrains`: whether the sampler can constrain. `before_content`: what the model writes before its answer.
        """
        self.calls = calls
        self.thinks = thinks
        self.constrains = constrains
        self.before_content = before_content

    def constraint(self, request: ChatRequest) -> Constraint | None:
        """The constraint of a request's answers, without regard to reasoning; None if they are free."""
        if request.response_format is None and not request.tools and not must_call(request):
            return None
        content = content_form(request)
        tools = self._demanded_tools(request, content is not None)
        if content is None and not tools:
            return self._strict_calls(request)
        field = "response_format" if content else "tool_choice"
        if not self.constrains:
            raise ApiError(400, f"This server's engine cannot restrict answers; leave {field} out.", param=field)
        if content is not None:
            content = replace(content, before=self.before_content)
        if not tools:
            return Constraint(content)
        if self.calls is None:
            message = "This model does not write tool calls as JSON, so they cannot be demanded; leave tool_choice out."
            raise ApiError(400, message, param="tool_choice")
        calls = self.calls
        one = isinstance(request.tool_choice, NamedTool) or request.parallel_tool_calls is False
        forms = tuple(call_form(calls, tool) for tool in tools)
        return Constraint(None if must_call(request) else content, forms, None if one else calls.separator)

    def _strict_calls(self, request: ChatRequest) -> Constraint | None:
        """The constraint of free answers whose calls of strict tools must fit; None if no tool is strict.

        Where the engine cannot constrain, calls are free, as those of other tools are: clients ask for strict tools by
        default. So are those of models whose calls are not JSON, or whose text is not free before a call.
        """
        tools = [tool["function"] for tool in request.offered_tools]
        calls = self.calls
        free = not self.constrains or self.before_content
        if free or calls is None or not any(tool.get("strict") is True for tool in tools):
            return None
        forms = tuple(
            call_form(calls, tool if tool.get("strict") is True else {"name": tool["name"]}) for tool in tools
        )
        separator = None if request.parallel_tool_calls is False else calls.separator
        return Constraint(None, forms, separator, trigger=calls.trigger)

    def for_prompt(self, constraint: Constraint, prompt: RenderedPrompt) -> Constraint:
        """The constraint with the reasoning that a prompt leaves room for."""
        if prompt.opens_reasoning:
            return replace(constraint, thinking=Thinking.BEGUN)
        thinking = Thinking.OPTIONAL if self.thinks and not prompt.ends_reasoning else Thinking.NONE
        return replace(constraint, thinking=thinking)

    def _demanded_tools(self, request: ChatRequest, restricted: bool) -> Sequence[Mapping[str, Any]]:
        """The functions that the answer may call, if it must call one or is restricted otherwise. Raises ApiError."""
        tools = [tool["function"] for tool in request.offered_tools]
        choice = request.tool_choice
        if must_call(request) and not tools:
            raise ApiError(400, "tool_choice demands a call, but there are no tools.", param="tool_choice")
        if isinstance(choice, NamedTool):
            chosen = [tool for tool in tools if tool["name"] == choice.function.name]
            if not chosen:
                name = choice.function.name
                raise ApiError(400, f"tool_choice names {name!r}, which is not one of the tools.", param="tool_choice")
            return chosen
        return tools if must_call(request) or restricted else []


def call_form(calls: CallFormat, tool: Mapping[str, Any]) -> JsonForm:
    parameters = tool.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise ApiError(400, f"The parameters of {tool['name']!r} are not a JSON schema.", param="tools")
    # Arguments are always an object, whatever the schema leaves out.
    schema = schema_text({"type": "object", **parameters}, "tools")
    return JsonForm(schema, calls.start(tool["name"]), calls.after, strict=tool.get("strict") is True)


def must_call(request: ChatRequest) -> bool:
    return request.tool_choice not in (None, "none", "auto")


def content_form(request: ChatRequest) -> JsonForm | None:
    """The form of the answer's text; None if it is free."""
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return None
    if not isinstance(wanted, JsonSchemaFormat):
        return JsonForm(ANY_OBJECT)
    given = wanted.json_schema
    strict = given.strict is True
    return JsonForm(schema_text(given.schema_ or {"type": "object"}, "response_format"), strict=strict)


def schema_text(schema: Mapping[str, Any], param: str) -> str:
    """A schema as JSON. Raises ApiError for one that is too large."""
    if depth_of(schema) > MAX_SCHEMA_DEPTH:
        raise ApiError(400, f"The schema is nested deeper than {MAX_SCHEMA_DEPTH} levels.", param=param)
    text = json.dumps(schema)
    if len(text) > MAX_SCHEMA_BYTES:
        raise ApiError(400, f"The schema is larger than {MAX_SCHEMA_BYTES // 1000} KB.", param=param)
    return text


def depth_of(value: Any) -> int:
    """How deeply a value is nested; stops counting when it is certain that it is too deep."""
    depth = 0
    level = [value]
    while level and depth <= MAX_SCHEMA_DEPTH:
        depth += 1
        parts = [part.values() if isinstance(part, dict) else part for part in level if isinstance(part, dict | list)]
        level = [item for part in parts for item in part]
    return depth


#: The largest body of a request that is not a chat, in bytes.
MAX_SMALL_BODY_BYTES = 1_000_000
#: How many bodies of the largest size may be held at once.
MAX_LARGE_BODIES = 8
#: The most values in a body, the keys of objects not counted. Parsing a value holds up all other requests, for a few
#: microseconds each; an agent's request with thousands of messages has a quarter of this.
MAX_VALUES = 50_000
QUOTE = b'"'
BACKSLASH = ord("\\")
#: Larger bodies are read in a thread, so that other requests do not wait.
MAX_INLINE_BYTES = 16_384
#: A body with more bytes for each token of the context does not fit: tokens have up to a hundred bytes, and JSON may
#: write each of them with six.
MAX_BYTES_PER_TOKEN = 512
#: A prompt with more tokens than this many contexts is refused before it has been tokenised to the end.
MAX_CONTEXTS = 2
#: How much memory the messages and the tools of earlier requests may take, with what was derived of them. The
#: conversations of these messages may take as much again, if they hold others.
MAX_KNOWN_MESSAGES_BYTES, MAX_KNOWN_TOOLS_BYTES = 64_000_000, 16_000_000
#: From a body to a chat request. Raises ApiError.
Parse = Callable[[bytes], ChatRequest]


class BodyReader:
    """Reads the bodies of a server's requests.

    - A body is refused as soon as it is too large. Its length header is not trusted.
    - All bodies that have not been parsed yet have a bounded size together.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.max_large_bodies = MAX_LARGE_BODIES
        self._held = 0

    @contextlib.asynccontextmanager
    async def read(self, request: Request, max_bytes: int = MAX_SMALL_BODY_BYTES) -> AsyncIterator[bytes]:
        """The request's body, which counts as held until the block ends. Raises 413, and 429 if too much is held."""
        most = min(max_bytes, self.max_bytes)
        parts: list[bytes] = []
        size = 0
        try:
            more = True
            while more:
                message = await request.receive()
                if message["type"] == "http.disconnect":
                    raise ApiError(400, "The client disconnected before it had sent the whole request.")
                parts.append(message.get("body", b""))
                more = message.get("more_body", False)
                size += len(parts[-1])
                self._held += len(parts[-1])
                self._check(size, most)
            body = b"".join(parts)
            parts.clear()
            yield body
        finally:
            self._held -= size

    def _check(self, size: int, max_bytes: int) -> None:
        """Raise ApiError if a body of which so much has arrived is too large, or if too much is held."""
        if size > max_bytes:
            hint = " (--max-request-mb)" if max_bytes == self.max_bytes else ""
            raise ApiError(413, f"The request is larger than {max_bytes / 1e6:g} MB{hint}.")
        if self._held > self.max_large_bodies * self.max_bytes:
            message = "The server is reading too many large requests at the moment; try again later."
            raise ApiError(429, message, code="too_many_large_requests", headers={"Retry-After": "1"})


@dataclass(frozen=True, slots=True)
class RawRequest:
    """A request as it came."""

    body: bytes
    parse: Parse
    owner: str
    headers: Mapping[str, str]
    ready_line: Callable[[], Awaitable[str]] | None = None
    """Names the line of policies that answers, once it can and the request has been parsed; None: the shared one."""


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A request that has arrived, and its prompt."""

    owner: str
    headers: Mapping[str, str]
    request: ChatRequest
    chat: TemplateInput
    prompt: RenderedPrompt
    """The chat as the client sent it, rendered."""
    constraint: Constraint | None
    """What its answers must look like, without regard to reasoning; None if they are free."""
    episode: EpisodeMode | None
    """Given if the request is part of an episode."""
    session: NamedSession | None
    """None if the client names none."""
    max_context_tokens: int
    """The model's limit, answer included."""
    arrived: float
    """When its body had arrived, as `time.perf_counter` counts."""
    line: str = SHARED
    """The line of policies that answers it."""


class RequestReader:
    """Reads chat requests for one model.

    - While one is read, others are served, whatever its body contains: no part of the work that stops other threads
      grows with the request. (`benchmarks/freeze.py` measures it.)
    - A request that cannot fit into the context is refused before it is tokenised to the end.
    - Requests of a megabyte and more are read one at a time, and delay no smaller ones.
    """

    def __init__(self, renderer: Renderer, sampler: Sampler, rules: AnswerRules | None) -> None:
        """Without `rules`, requests are passed on to another API, which knows its own limits."""
        self.renderer = renderer
        self.sampler = sampler
        self.rules = rules
        self._messages = KnownMessages(MAX_KNOWN_MESSAGES_BYTES)
        self._tools = Known(KnownTools, MAX_KNOWN_TOOLS_BYTES)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="read")
        self._thread_for_large = ThreadPoolExecutor(1, thread_name_prefix="read-large")

    async def read(self, raw: RawRequest, then: Callable[[IncomingRequest], T], *, in_thread: bool = False) -> T:
        """Read a request; what `then` makes of it, on the same thread. Raises ApiError.

        `in_thread`: also a small request is read in a thread, because `then` takes a while.
        """
        arrived = time.perf_counter()

        def work() -> T:
            return then(self._read(raw, arrived))

        if len(raw.body) <= MAX_INLINE_BYTES and not in_thread:
            return work()
        threads = self._threads if len(raw.body) <= MAX_SMALL_BODY_BYTES else self._thread_for_large
        return await asyncio.get_running_loop().run_in_executor(threads, work)

    def _read(self, raw: RawRequest, arrived: float) -> IncomingRequest:
        body, headers = raw.body, raw.headers
        limit = self.sampler.limits.max_context_tokens
        if self.rules and len(body) > max(MAX_SMALL_BODY_BYTES, MAX_BYTES_PER_TOKEN * limit):
            raise far_too_long(limit)
        check_values([body])
        request = raw.parse(body)
        messages: Sequence[Message] = self._messages(request.message_dicts())
        check_supported(request, messages, passed_on=self.rules is None)
        calls = [call["function"] for message in messages for call in message.get("tool_calls", ())]
        if calls:
            check_values([body, *(utf8(call["arguments"]) for call in calls)])
        tools = self._tools(request.offered_tools) if request.offered_tools else []
        chat = TemplateInput(messages, tools, request.chat_template_kwargs)
        try:
            if isinstance(request, TextRequest):
                prompt = self.renderer.text_prompt(request.prompt, MAX_CONTEXTS * limit)
            else:
                prompt = self.renderer.render(chat, MAX_CONTEXTS * limit)
        except ChatError as error:
            raise ApiError(400, str(error), param="messages") from error
        except TooLong:
            raise far_too_long(limit) from None
        episode = episode_of(headers, request)
        return IncomingRequest(
            owner=raw.owner,
            headers=headers,
            request=request,
            chat=chat,
            prompt=prompt,
            constraint=self.rules.constraint(request) if self.rules else None,
            episode=episode,
            session=named_session(headers, request, messages, in_episode=episode is not None),
            max_context_tokens=limit,
            arrived=arrived,
        )


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


def most_values(text: bytes | str) -> int:
    """At least as many values as a JSON text of this length can have: each takes two characters."""
    return len(text) // 2 + 1


def count_values(body: bytes) -> int:
    """How many values a JSON text has; beyond MAX_VALUES, at least how many."""
    at_most = separators(body)
    if at_most <= MAX_VALUES:
        return at_most
    # Many of them may be in strings. Short steps, so that other threads can go on.
    count = 0
    start = 0
    while start < len(body) and count <= MAX_VALUES:
        opening = body.find(QUOTE, start)
        count += separators(body[start : opening if opening >= 0 else len(body)])
        if opening < 0:
            break
        start = end_of_string(body, opening + 1)
    return count


def end_of_string(body: bytes, start: int) -> int:
    """Where a string ends whose opening quote is before `start`."""
    while (closing := body.find(QUOTE, start)) >= 0:
        first = closing
        while first > start and body[first - 1] == BACKSLASH:
            first -= 1
        start = closing + 1
        if (closing - first) % 2 == 0:
            return start
    return len(body)
