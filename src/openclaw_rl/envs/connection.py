"""The server as the driver uses it: answers, rewards, and how long its queue is."""

import asyncio
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import quote

from openclaw_rl.client import GIVE_KEY, ServerGone, key_header, read_error
from openclaw_rl.envs.base import Message, Tool
from openclaw_rl.errors import UserError
from openclaw_rl.evals.chat import BUSY_STATUSES, TOO_LONG, pause
from openclaw_rl.http_client import ConnectFailed, HttpClient, HttpError, HttpResponse, url_without_account

#: How long a server may be away, for example to restart, before the rollout ends.
MAX_AWAY_SECONDS = 120.0
#: How long a server may take to answer anything but a chat request.
ANSWER_SECONDS = 60.0
#: Shorter than the time after which a server closes an idle connection (5 s), so that no request meets a closed one.
KEEPALIVE_SECONDS = 3.0
CHAT, READY = "/v1/chat/completions", "/readyz"
#: What the server takes.
MAX_TASK_CHARACTERS = 256
#: Longer errors are cut.
MAX_ERROR_CHARACTERS = 1000
FINGERPRINT = re.compile(r"policy-(\d+)\Z")


class AnswerFailed(Exception):
    """The server gave no usable answer. The attempt fails; this says nothing about the policy."""


class EpisodeTooLong(AnswerFailed):
    """The episode no longer fits the model's context."""


class RewardRefused(Exception):
    """The server does not record this reward; the message is its own."""


@dataclass(frozen=True, slots=True)
class EpisodeAnswer:
    """One answer of the policy."""

    id: str
    message: Message
    """As it was received."""
    version: int | None
    """The policy version that answered, if the server says it."""


@dataclass(frozen=True, slots=True)
class QueueState:
    """How far the server is behind what it was given."""

    version: int = 0
    waiting: int = 0
    """Turns that wait to be judged or trained on."""
    needed: int = 0
    """Turns in a training step; 0 if the server does not train."""
    training: bool = False
    """Whether a training step is running."""

    @property
    def batches(self) -> float:
        """How many training steps the waiting turns make."""
        return self.waiting / self.needed if self.needed else 0.0


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn."""

    max_tokens: int
    temperature: float | None = None


class PolicyServer:
    """An ordinary client of the server's API.

    - It never goes through a proxy.
    - While the server is busy (429, 503) or away, requests wait: as long as it asks for, then try again.
    - If all requests of MAX_AWAY_SECONDS fail, ServerGone is raised. The time before the first failure does not count.
    - A chat request is sent once: if the connection breaks after that, the answer may be recorded already.
    - A reward is sent until it is answered: the server counts equal rewards once.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.key = key
        self.url = url.rstrip("/").removesuffix("/v1")
        self._shown = url_without_account(self.url)
        """The URL for messages."""
        try:
            # Callers bound the time of a whole request.
            self._http = HttpClient(self.url, key_header(key), keepalive_seconds=KEEPALIVE_SECONDS)
        except ValueError as error:
            raise UserError(f"{self._shown} is not the address of a server: {error}.") from None
        except HttpError as error:
            raise UserError(f"The API key cannot be sent: {error}. {GIVE_KEY}") from None
        self._away, self._queue_unknown = FailureClock(), FailureClock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def answer(
        self,
        session: str,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        sampling: Sampling,
        *,
        seed: int,
        evaluates: bool,
        seconds: float,
    ) -> EpisodeAnswer:
        """The policy's answer. Raises AnswerFailed, and UserError for what a user has to fix."""
        body: dict[str, Any] = {"messages": messages, "max_tokens": sampling.max_tokens, "seed": seed}
        if tools:
            body["tools"] = tools
        if sampling.temperature is not None:
            body["temperature"] = sampling.temperature
        headers = {"X-Session-Id": session, "X-Episode": "eval" if evaluates else "1"}
        response = await self._post(CHAT, body, headers, seconds)
        if response.status_code != HTTPStatus.OK:
            message, code = read_error(response)
            failure = EpisodeTooLong if code == TOO_LONG else AnswerFailed
            raise failure(f"the server answers {response.status_code}: {message}")
        return read_answer(response)

    async def reward(self, session: str, body: Mapping[str, Any]) -> None:
        """Reward a session, or say that it failed. Raises RewardRefused."""
        path = f"/v1/sessions/{quote(session, safe='')}/reward"
        for attempt in range(1_000_000):
            try:
                response = await self._post(path, body, {}, ANSWER_SECONDS)
                break
            except AnswerFailed:
                self._check_away()
                await asyncio.sleep(pause({}, attempt))
        if response.status_code != HTTPStatus.OK:
            raise RewardRefused(read_error(response)[0])

    async def model(self) -> str:
        """The name of the model that the server has. Raises UserError."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                return str((await self._send("GET", "/v1/models", b"", {})).json()["data"][0]["id"])
        except (HttpError, TimeoutError, ValueError, KeyError, IndexError, TypeError):
            raise UserError(
                f"The server at {self._shown} does not say which model it has: check the address."
            ) from None

    async def queue(self) -> QueueState | None:
        """How far the server is behind; None if it does not say now. Raises ServerGone if it does not for too long."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                state = read_queue((await self._send("GET", READY, b"", {})).json())
        except (HttpError, TimeoutError, ValueError, RecursionError):
            state = None
        if state is not None:
            self._queue_unknown.reset()
        elif self._queue_unknown.too_long():
            raise ServerGone(f"The server at {self._shown} does not say how many turns wait. Is it still running?")
        return state

    async def _post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str], seconds: float
    ) -> HttpResponse:
        """Send until the server is not busy. Raises AnswerFailed if it does not answer in time or breaks off."""
        content = json.dumps(body).encode()
        attempt = 0
        while True:
            response = None
            try:
                async with asyncio.timeout(seconds):
                    response = await self._send("POST", path, content, headers)
            except ConnectFailed:
                self._check_away()
            except TimeoutError:
                raise AnswerFailed(f"the server did not answer within {seconds:g} seconds") from None
            except HttpError as error:
                raise AnswerFailed(f"the connection to the server broke: {error}") from None
            if response is not None and response.status_code == HTTPStatus.UNAUTHORIZED:
                raise UserError(f"{read_error(response)[0]} {GIVE_KEY}")
            if response is not None and response.status_code not in BUSY_STATUSES:
                return response
            await asyncio.sleep(pause({} if response is None else response.headers, attempt))
            attempt += 1

    async def _send(self, method: str, path: str, content: bytes, headers: Mapping[str, str]) -> HttpResponse:
        response = await self._http.request(method, path, content, headers)
        self._away.reset()
        return response

    def _check_away(self) -> None:
        if self._away.too_long():
            raise ServerGone(f"The server at {self._shown} does not answer. Is it still running?")


class FailureClock:
    """Measures how long something has failed: from the first failure after a success."""

    def __init__(self) -> None:
        self._began: float | None = None

    def reset(self) -> None:
        """It succeeded."""
        self._began = None

    def too_long(self) -> bool:
        """It failed; whether it has failed for longer than a server may be away."""
        now = time.monotonic()
        self._began = now if self._began is None else self._began
        return now - self._began > MAX_AWAY_SECONDS


async def report(server: PolicyServer, session: str, body: Mapping[str, Any]) -> str:
    """Reward a session, or say that it failed; if the server refuses, why.

    A refused reward is reported as an error, so that the attempt has an end and its group does not wait for it.
    """
    try:
        await server.reward(session, body)
    except RewardRefused as refused:
        reason = str(refused)[:MAX_ERROR_CHARACTERS]
        if "error" not in body:
            attempt = {name: body[name] for name in ("task", "group", "group_size") if name in body}
            await report(server, session, {**attempt, "error": reason})
        return reason
    return ""


def read_answer(response: HttpResponse) -> EpisodeAnswer:
    """The first choice of a completion. Raises AnswerFailed."""
    try:
        body = response.json()
        message = body["choices"][0]["message"]
        version = FINGERPRINT.match(str(body.get("system_fingerprint")))
        if not isinstance(message, dict) or message.get("role") != "assistant":
            raise TypeError
        return EpisodeAnswer(str(body["id"]), message, int(version[1]) if version else None)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise AnswerFailed("the server's answer is not a chat completion: check the address") from None


def read_queue(state: Any) -> QueueState | None:
    """What `/readyz` says about the work that waits; None if that cannot be understood, or is not known now."""
    try:
        version, step = int(state.get("policy_version", 0)), state.get("next_step")
        if step is None:  # it does not train: nothing that waits can delay a step
            return QueueState(version)
        waiting = int(state["queue"]["to_judge"]) + int(state["queue"]["to_train"])
        return QueueState(version, waiting, int(step["needed"]), bool(step.get("training")))
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError):
        return None
