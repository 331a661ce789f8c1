"""The server as the driver uses it: answers, rewards, and how long its queue is."""

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Self
from urllib.parse import quote

from openclaw_rl.client import CHAT, GIVE_KEY, READY, ApiClient, Retries, ServerError, server_root
from openclaw_rl.envs.base import Message, Tool
from openclaw_rl.errors import UserError
from openclaw_rl.http_client import HttpResponse

#: How long a server may be away, for example to restart, before the rollout ends.
MAX_AWAY_SECONDS = 120.0
#: A chat request is sent once: if the connection breaks after that, the answer may be recorded already.
CHAT_RETRIES = Retries(math.inf, unsent=True)
#: How long a server may take to answer anything but a chat request.
ANSWER_SECONDS = 60.0
#: What the server takes.
MAX_TASK_CHARACTERS = 256
#: Longer errors are cut.
MAX_ERROR_CHARACTERS = 1000
FINGERPRINT = re.compile(r"policy-(\d+)\Z")


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
    - If all requests of `MAX_AWAY_SECONDS` fail, UserError is raised. The time before the first failure does not count.
    - A chat request is sent once, as CHAT_RETRIES says.
    - A reward is sent until it is answered: the server counts equal rewards once.
    """

    def __init__(self, url: str, key: str = "", *, retries: Retries = CHAT_RETRIES) -> None:
        self.key = key
        self.url = server_root(url)
        self._api = ApiClient(
            self.url, key, name="the server", key_advice=GIVE_KEY, retries=retries, on_retry=self._note_failure
        )
        self._api.check()
        self._reward_retries = replace(retries, broken=True)
        self._away = FailureClock()
        self._queue_unknown = FailureClock()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._api.close()

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
        """The policy's answer. Raises ServerError, and UserError for what a user has to fix."""
        body: dict[str, Any] = {"messages": messages, "max_tokens": sampling.max_tokens, "seed": seed}
        if tools:
            body["tools"] = tools
        if sampling.temperature is not None:
            body["temperature"] = sampling.temperature
        headers = {"X-Session-Id": session, "X-Episode": "eval" if evaluates else "1"}
        return read_answer(await self._post(CHAT, body, headers=headers, seconds=seconds))

    async def reward(self, session: str, body: Mapping[str, Any]) -> None:
        """Reward a session, or say that it failed. Raises ServerError if the server does not record it."""
        path = f"/v1/sessions/{quote(session, safe='')}/reward"
        await self._post(path, body, seconds=ANSWER_SECONDS, retries=self._reward_retries)

    async def model(self) -> str:
        """The name of the model that the server has. Raises UserError."""
        try:
            answer = await self._api.send("GET", "/v1/models", seconds=ANSWER_SECONDS)
            return str(answer.json()["data"][0]["id"])
        except (ServerError, ValueError, KeyError, IndexError, TypeError):
            raise UserError(
                f"The server at {self._api.url} does not say which model it has: check the address."
            ) from None

    async def queue(self) -> QueueState | None:
        """How far the server is behind; None if it does not say now. Raises UserError if it does not for too long."""
        try:
            answer = await self._api.send("GET", READY, seconds=ANSWER_SECONDS)
            self._away.reset()
            state = read_queue(answer.json())
        except (ServerError, ValueError, RecursionError):
            state = None
        if state is not None:
            self._queue_unknown.reset()
        elif self._queue_unknown.too_long():
            raise UserError(f"The server at {self._api.url} does not say how many turns wait. Is it still running?")
        return state

    async def _post(self, path: str, body: Mapping[str, Any], **settings: Any) -> HttpResponse:
        try:
            response = await self._api.call("POST", path, body, **settings)
        except ServerError as error:
            if error.status == HTTPStatus.UNAUTHORIZED:
                raise UserError(error.message) from None
            raise
        self._away.reset()
        return response

    def _note_failure(self, failure: ServerError, _pause: float) -> None:
        if failure.status:
            self._away.reset()
        elif self._away.too_long():
            raise UserError(f"The server at {self._api.url} does not answer. Is it still running?")


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
    except ServerError as refused:
        reason = refused.message[:MAX_ERROR_CHARACTERS]
        if "error" not in body:
            attempt = {name: body[name] for name in ("task", "group", "group_size") if name in body}
            await report(server, session, {**attempt, "error": reason})
        return reason
    return ""


def read_answer(response: HttpResponse) -> EpisodeAnswer:
    """The first choice of a completion. Raises ServerError."""
    try:
        body = response.json()
        message = body["choices"][0]["message"]
        version = FINGERPRINT.match(str(body.get("system_fingerprint")))
        if not isinstance(message, dict) or message.get("role") != "assistant":
            raise TypeError
        return EpisodeAnswer(str(body["id"]), message, int(version[1]) if version else None)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        raise ServerError("the server's answer is not a chat completion: check the address") from None


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
