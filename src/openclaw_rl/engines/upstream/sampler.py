"""The sampler of a model behind one or several OpenAI-compatible APIs, and how it reads their answers."""

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from pydantic_core import from_json

from openclaw_rl.client import TOO_LONG, ApiClient, ServerError, error_message, events, whole_answer, without_key
from openclaw_rl.engines.base import (
    ApiRefused,
    ChatCall,
    EngineLimits,
    EngineStats,
    EngineUnavailable,
    SamplerCapabilities,
    TextPiece,
    TextSampler,
)
from openclaw_rl.engines.serving import Admission, PieceStream
from openclaw_rl.http_client import HttpResponse
from openclaw_rl.rendering.response import Delta, ReasoningSplitter, ReasoningText, WholeText
from openclaw_rl.rendering.tool_calls import ParsedToolCall, new_call_id
from openclaw_rl.types import BASE_VERSION

log = logging.getLogger(__name__)

CHAT, TEXT, MODELS = "/chat/completions", "/completions", "/models"
#: How long the API may take to accept a connection, and to list its models.
CONNECT_SECONDS, LIST_SECONDS = 10.0, 30.0
#: A request that could not be sent is tried once more after this time, on another server if there is one.
PAUSE_SECONDS = 0.25
#: How often an API that cannot be reached is looked at.
LOOK_SECONDS = 2.0
GATEWAY_TIMEOUT = 504
SILENT = "upstream_timeout"
#: Of an error, so much is read and so much is passed on.
MAX_ERROR_BYTES, MAX_MESSAGE_CHARACTERS = 1 << 20, 500
#: What clients are told if the API does not say how long a conversation may be.
USUAL_CONTEXT = 131_072
#: The names under which APIs say so.
CONTEXT_NAMES = ("max_model_len", "max_input_tokens", "context_length", "max_context_length", "n_ctx")
#: How APIs say that a conversation is too long. Clients that know the code shorten it.
_TOO_LONG = re.compile(r"context (size|length|window)|prompt is too long", re.IGNORECASE)
KEY_ADVICE = "Check UPSTREAM_API_KEY of this server."
CLOSING = "The server is shutting down."
#: Most models that a message names.
MAX_NAMED = 5

CAPABILITIES = SamplerCapabilities(
    loads=frozenset(), tokens=False, max_top_logprobs=0, scores_targets=False, raw_logprobs=False, candidates=False
)


@dataclass(frozen=True, slots=True)
class UpstreamSettings:
    """What the sampler is built from."""

    urls: Sequence[str]
    model: str
    key: str
    timeout: float
    max_context: int | None
    max_sequences: int
    max_queue: int


class Upstream:
    """One URL."""

    def __init__(self, url: str, key: str) -> None:
        self.api = ApiClient(
            url,
            key,
            key_advice=KEY_ADVICE,
            headers={"Accept-Encoding": "identity"},
            through_proxy=True,
            connect_seconds=CONNECT_SECONDS,
            max_body_bytes=MAX_ERROR_BYTES,
        )
        self.api.check()
        self.running = 0
        self.trouble = ""
        """Why it cannot be reached; empty if it can."""

    @contextlib.contextmanager
    def working(self) -> Iterator[None]:
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1

    async def models(self) -> list[dict[str, Any]]:
        """The models that it lists; none if it has no list. Raises ServerError if it cannot be used at all."""
        try:
            found = (await self.api.call("GET", MODELS, seconds=LIST_SECONDS)).json()["data"]
            return [model for model in found if isinstance(model.get("id"), str)]
        except ServerError as error:
            if not error.status or error.status in (401, 403):
                raise
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            pass
        return []

    def doubt(self, model: str, models: Sequence[dict[str, Any]]) -> str:
        """What is odd about the models that it lists; empty if nothing is."""
        if not models:
            is_usual = re.search(r"/v\d", self.api.url)
            return "" if is_usual else f"{self.api.url} lists no models: the URL of such an API mostly ends with /v1"
        names = [model["id"] for model in models]
        if model in names:
            return ""
        return f"{self.api.url} does not list {model}, but: {', '.join(names[:MAX_NAMED])}"


class UpstreamSampler(TextSampler):
    """Implements `TextSampler`.

    - A request is sent a second time only if no connection could be made: nothing has been sent then.
    - Ending a stream early closes its connection, by which the API knows that nobody waits.
    - The key is sent to the given URLs alone: no redirect is followed, and no message repeats it.
    - An API that cannot be reached gets requests again as soon as it answers.
    - Each answer is a request of its own: many APIs ignore `n`.
    """

    capabilities = CAPABILITIES
    newest_version = BASE_VERSION

    def __init__(self, settings: UpstreamSettings) -> None:
        self.settings = settings
        try:
            self.servers = [Upstream(url, settings.key) for url in settings.urls]
        except ServerError as error:
            raise EngineUnavailable(str(error)) from None
        self._context: int | None = None
        self._admission = Admission(settings.max_sequences, settings.max_queue)
        self._ids = count(1)
        self._tasks: dict[int, dict[int, asyncio.Task[None]]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._closed = False
        self._limit_field = "max_tokens"
        """What the API calls the most tokens of an answer."""
        self._asks_usage = True

    @property
    def limits(self) -> EngineLimits:
        return self._admission.limits(self.settings.max_context or self._context or USUAL_CONTEXT)

    def describe(self) -> str:
        where = ", ".join(server.api.url for server in self.servers)
        return f"{self.settings.model} behind the API at {where}, which is sent what people say"

    def stats(self) -> EngineStats:
        away = [server for server in self.servers if server.trouble]
        detail = CLOSING if self._closed else " ".join(server.trouble for server in away)
        waiting = max(0, self._admission.outstanding - self.settings.max_sequences)
        servers = {server.api.url: None if server.trouble else server.running for server in self.servers}
        is_ready = not self._closed and len(away) < len(self.servers)
        return EngineStats(is_ready, self._admission.outstanding - waiting, waiting, 0, detail, servers)

    async def start(self) -> None:
        for server in self.servers:
            try:
                self._read_models(server, await server.models())
            except ServerError as error:
                if error.status:
                    raise EngineUnavailable(f"{server.api.url} answers {error.status}: {error.message}") from None
                server.trouble = self._unreachable(server, error)
        if all(server.trouble for server in self.servers):
            raise EngineUnavailable(f"{self.servers[0].trouble} Start the API, or check --upstream-url.")
        self._look_again()

    def _read_models(self, server: Upstream, models: Sequence[dict[str, Any]]) -> None:
        for model in models:
            if model["id"] == self.settings.model:
                said = {**(model.get("meta") or {}), **model}
                self._context = next((n for name in CONTEXT_NAMES if isinstance(n := said.get(name), int)), None)
        if doubt := server.doubt(self.settings.model, models):
            log.warning("%s.", doubt)

    async def close(self) -> None:
        self._closed = True
        tasks = [task for tasks in self._tasks.values() for task in tasks.values()]
        for task in (*tasks, *([self._looking] if self._looking else [])):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(server.api.close() for server in self.servers))

    def chat(self, call: ChatCall) -> PieceStream:
        if self._closed:
            raise EngineUnavailable(CLOSING)
        self._admission.check(call)
        stream = PieceStream(self, next(self._ids), BASE_VERSION, call.n)
        self._admission.enter(stream, call.priority)
        self._tasks[stream.id] = {
            index: asyncio.create_task(self._answer(stream, call, index)) for index in range(call.n)
        }
        return stream

    def cancel(self, id: int, index: int | None = None) -> None:
        for number, task in self._tasks.get(id, {}).items():
            if index in (None, number):
                task.cancel()

    def forget(self, stream: PieceStream) -> None:
        for task in self._tasks.pop(stream.id, {}).values():
            task.cancel()
        self._admission.leave(stream)

    async def _answer(self, stream: PieceStream, call: ChatCall, index: int) -> None:
        """Feed one answer to its stream."""
        reader = AnswerReader(is_chat="messages" in call.body)
        try:
            async with contextlib.aclosing(self._events(call, index)) as events:
                async for event in events:
                    if deltas := reader.read(event):
                        stream.feed([TextPiece(index, deltas)])
            if reader.finish is None:
                raise ApiRefused(f"{BROKE_OFF}.", BAD_GATEWAY, BROKEN)
            for name, number in reader.usage.items():
                stream.usage[name] = stream.usage.get(name, 0) + number
            # The numbers of tokens come after the last word, and belong to the turn.
            stream.feed([TextPiece(index, (), reader.finish)])
        except EngineUnavailable as error:
            error.args = (self._without_key(str(error)),)
            if isinstance(error, ApiRefused) and error.code:
                error.code = self._without_key(error.code)
            stream.fail(error)

    async def _events(self, call: ChatCall, index: int) -> AsyncGenerator[Any, None]:
        """The events of an answer. Raises EngineUnavailable."""
        tried: list[Upstream] = []
        while True:
            server = self._choose(tried)
            tried.append(server)
            body = self._body(call, index)
            try:
                answer = self._events_of(server, body)
                with server.working():
                    async with contextlib.aclosing(answer) as events:
                        async for event in events:
                            yield event
                return
            except ServerError as error:
                if not error.status and not error.was_sent:
                    server.trouble = self._unreachable(server, error)
                    self._look_again()
                    if len(tried) <= max(1, len(self.servers) - 1):
                        await asyncio.sleep(PAUSE_SECONDS)
                        continue
                elif self._adapts_to(error, body):
                    tried.pop()
                    continue
                raise self._refusal(server, error) from error

    async def _events_of(self, server: Upstream, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
        """The events of one server's answer. Raises ServerError, and ApiRefused if it is silent for too long."""
        seconds = self.settings.timeout
        clock = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(seconds) as patience:
                path = CHAT if "messages" in body else TEXT
                # To sample an answer twice does no harm.
                async with server.api.stream("POST", path, body, repeatable=True) as answer:
                    server.trouble = ""
                    async for event in answer_events(answer):
                        patience.reschedule(clock() + seconds)
                        yield event
        except TimeoutError:
            raise ApiRefused(f"The API said nothing for {seconds:g} seconds.", GATEWAY_TIMEOUT, SILENT) from None

    def _choose(self, tried: Sequence[Upstream]) -> Upstream:
        """The first server with the least to do: one that is used alone keeps a conversation's prefix cached."""
        others = [server for server in self.servers if server not in tried] or self.servers
        return min(others, key=lambda server: (bool(server.trouble), server.running))

    def _body(self, call: ChatCall, index: int) -> dict[str, Any]:
        body = {**call.body, "model": self.settings.model, "stream": True}
        if (most := body.pop("max_tokens", None)) is not None:
            body[self._limit_field] = most
        if self._asks_usage:
            body["stream_options"] = {"include_usage": True}
        if body.get("seed") is not None:
            body["seed"] += index
        return body

    def _adapts_to(self, error: ServerError, sent: Mapping[str, Any]) -> bool:
        """Whether the API refused a field of what was sent that can be written otherwise. It is, from now on."""
        if error.status not in (400, 422):
            return False
        if "max_completion_tokens" in error.message and "max_tokens" in sent:
            self._limit_field = "max_completion_tokens"
        elif "stream_options" in error.message and "stream_options" in sent:
            self._asks_usage = False
        else:
            return False
        return True

    def _refusal(self, server: Upstream, error: ServerError) -> EngineUnavailable:
        if not error.status and not error.was_sent:
            return EngineUnavailable(server.trouble)
        message = error.message
        if 400 <= error.status < 600:
            code = error.code if isinstance(error.code, str) else None
            if error.status == 400 and _TOO_LONG.search(message):
                code = TOO_LONG
            text = f"{server.api.url} answers {error.status}: {message}"
            return ApiRefused(text, error.status, code, error.retry_after)
        return ApiRefused(f"{server.api.url} broke off its answer: {message}", BAD_GATEWAY, BROKEN)

    def _unreachable(self, server: Upstream, error: ServerError) -> str:
        return f"{server.api.url} cannot be reached: {self._without_key(error.message)}."

    def _without_key(self, message: str) -> str:
        return without_key(message, self.settings.key)[:MAX_MESSAGE_CHARACTERS]

    def _look_again(self) -> None:
        if any(server.trouble for server in self.servers) and (self._looking is None or self._looking.done()):
            self._looking = asyncio.create_task(self._look())

    async def _look(self) -> None:
        """Look at the servers that cannot be reached until all can."""
        while away := [server for server in self.servers if server.trouble]:
            await asyncio.sleep(LOOK_SECONDS)
            for server in away:
                try:
                    await server.api.send("GET", MODELS, seconds=LIST_SECONDS)
                    server.trouble = ""
                except ServerError as error:
                    server.trouble = self._unreachable(server, error)


#: The status of an answer that broke off or cannot be read.
BAD_GATEWAY = 502
BROKEN = "upstream_broken"
BROKE_OFF = "The API broke off its answer"
WRONG_FORM = "The API answers in a form that is not OpenAI's"
#: The names under which APIs send reasoning.
REASONING = ("reasoning_content", "reasoning")
#: The names under which they send text: of chats, of what a model refuses, of completions.
TEXTS = ("content", "refusal", "text")
EVENTS = "text/event-stream"
#: OpenAI's reasons for the end of an answer that every wire of ours knows.
FINISHES = ("stop", "length", "tool_calls")
COUNTS = ("prompt_tokens", "completion_tokens")


async def answer_events(answer: HttpResponse) -> AsyncIterator[Any]:
    """The events of an answer; one that is not streamed is a single event. Raises HttpError."""
    if EVENTS in answer.headers.get("content-type", EVENTS):
        async for event in events(answer):
            yield event
    else:
        yield await whole_answer(answer)


class AnswerReader:
    """Reads one answer. Raises ApiRefused for an error within it, and for what is not an answer.

    - A tool call is given when it is whole, as a JSON object.
    - Reasoning is given apart, also if the API writes it as a `<think>` block.
    """

    def __init__(self, *, is_chat: bool) -> None:
        self._splitter = ReasoningSplitter() if is_chat else WholeText()
        self._call: dict[str, Any] | None = None
        self._calls = 0
        self.finish: str | None = None
        """Why the answer ended, once it has."""
        self.usage: dict[str, int] = {}

    def read(self, event: Any) -> tuple[Delta, ...]:
        """What became certain with an event."""
        try:
            if event.get("error"):
                raise failure_within(event)
            self.usage |= read_usage(event.get("usage") or {})
            choice = (event.get("choices") or [{}])[0]
            new = tuple(self._read(choice.get("delta") or choice.get("message") or choice))
            if choice.get("finish_reason"):
                new += tuple(self._end())
                self.finish = self._finish(choice["finish_reason"])
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ApiRefused(f"{WRONG_FORM} ({error!r}).", BAD_GATEWAY, BROKEN) from error
        return new

    def _read(self, delta: Mapping[str, Any]) -> Iterator[Delta]:
        if thought := next((delta[name] for name in REASONING if isinstance(delta.get(name), str)), ""):
            yield ReasoningText(thought)
        if text := next(filter(None, map(delta.get, TEXTS)), ""):
            if not isinstance(text, str):
                raise TypeError("its content is not text")
            for channel, piece in self._splitter.push(text):
                yield ReasoningText(piece) if channel == "reasoning" else piece
        for part in delta.get("tool_calls") or ():
            yield from self._add(part)

    def _add(self, part: Mapping[str, Any]) -> Iterator[Delta]:
        """Add a part of a call. Some APIs number all calls 0 and tell them apart by their ids."""
        call = self._call
        place, id = part.get("index", 0), str(part.get("id") or "")
        if call is None or place != call["index"] or (id and call["id"] and id != call["id"]):
            yield from self._whole_call()
            call = self._call = {"index": place, "id": "", "name": "", "arguments": ""}
        function = part.get("function") or {}
        call["id"] = call["id"] or id
        call["name"] += function.get("name") or ""
        given = function.get("arguments") or ""
        call["arguments"] += given if isinstance(given, str) else json.dumps(given)

    def _whole_call(self) -> Iterator[Delta]:
        call, self._call = self._call, None
        if call is None:
            return
        arguments = call["arguments"].strip() or "{}"
        if not isinstance(from_json(arguments), dict):
            raise TypeError("a call's arguments are not an object")
        self._calls += 1
        yield ParsedToolCall(call["id"] or new_call_id(), call["name"], arguments)

    def _end(self) -> Iterator[Delta]:
        for channel, piece in self._splitter.flush():
            yield ReasoningText(piece) if channel == "reasoning" else piece
        yield from self._whole_call()

    def _finish(self, reason: str) -> str:
        if self._calls and reason != "length":
            return "tool_calls"
        return reason if reason in FINISHES[:2] else "stop"


def failure_within(event: Mapping[str, Any]) -> ApiRefused:
    """The error that an API sends in place of the rest of an answer."""
    error = event["error"]
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else BAD_GATEWAY
    message = f"{BROKE_OFF}: {error_message(event)}"
    return ApiRefused(message, status, code if isinstance(code, str) else BROKEN)


def read_usage(usage: Mapping[str, Any]) -> dict[str, int]:
    """OpenAI's numbers of tokens, as far as they are there."""
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    found = {name: usage.get(name) for name in COUNTS} | {"cached_tokens": cached}
    return {name: int(number) for name, number in found.items() if isinstance(number, int)}
