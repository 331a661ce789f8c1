"""How an outside trainer claims judged turns from a running server and confirms them."""

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import httpx

log = logging.getLogger(__name__)

#: How long one claim waits at the server; the client then asks again.
WAIT_SECONDS = 30.0
#: How long an answer may take beyond that: a claim can be hundreds of megabytes.
ANSWER_SECONDS = 300.0
#: Pauses while the server cannot be reached: each is twice as long as the one before, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
SERVER_ERROR = 500
LEASE_ENDED = "lease_ended"


class TrainingRefused(Exception):
    """The server refused a request; the message says why."""

    def __init__(self, message: str, code: str | None) -> None:
        super().__init__(message)
        self.code = code


class TrainerClient:
    """Claims and confirms turns.

    - A server that cannot be reached is asked again until it answers: claims that got lost run out by themselves, and
      a lease can be confirmed as often as one likes.
    - What a server refuses raises TrainingRefused with its sentence.
    """

    def __init__(self, url: str, key: str = "", *, pause: Callable[[float], None] = time.sleep) -> None:
        """`url` is the server's, without /v1; `key` is its admin key, if it has one."""
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._http = httpx.Client(headers=headers, timeout=WAIT_SECONDS + ANSWER_SECONDS)
        self._pause = pause

    def claim(self, count: int, lease_seconds: float | None = None) -> dict[str, Any]:
        """At least `count` turns, by group, as soon as there are so many. Raises TrainingRefused."""
        body: dict[str, Any] = {"count": count, "wait_seconds": WAIT_SECONDS}
        if lease_seconds is not None:
            body["lease_seconds"] = lease_seconds
        waits = ""
        while True:
            answer = self._post("claim", body)
            if answer["lease"] is not None:
                return answer
            if answer["waiting_for"] != waits:
                waits = answer["waiting_for"]
                log.info("No turns to train on yet: %s.", waits)

    def confirm(self, lease: str) -> int:
        """Tell the server that a lease's turns were trained on; the step. Raises TrainingRefused."""
        return int(self._post("confirm", {"lease": lease})["step"])

    def _post(self, call: str, body: Mapping[str, Any]) -> dict[str, Any]:
        pause = FIRST_PAUSE
        while True:
            try:
                response = self._http.post(f"{self.url}/v1/training/{call}", json=body)
                if response.status_code < SERVER_ERROR:
                    return checked(response)
                problem = response.text
            except httpx.TransportError as error:
                problem = repr(error)
            log.warning("%s does not answer (%s); it is asked again in %.0f s.", self.url, problem[:200], pause)
            self._pause(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)


def checked(response: httpx.Response) -> dict[str, Any]:
    """The answer. Raises TrainingRefused if it is a refusal, or not an answer of such a server."""
    try:
        answer: dict[str, Any] = response.json()
        if response.is_success:
            return answer
        error = answer["error"]
        raise TrainingRefused(error["message"], error["code"])
    except (ValueError, KeyError, TypeError):
        raise TrainingRefused(f"{response.url} is not an openclaw-rl server: {response.text[:200]}", None) from None
