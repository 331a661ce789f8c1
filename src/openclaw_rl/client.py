"""Calls to a running server of this package, and how errors of an OpenAI-compatible server are read."""

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol, Self

import httpx

from openclaw_rl.errors import UserError
from openclaw_rl.http_client import split_url, url_without_account

#: How long a server on this machine may take to say how it is.
PROBE_SECONDS = 2.0
#: How long any other answer may take: a laptop may be busy, and a rollback waits for the step under way.
ANSWER_SECONDS = 600.0
#: How much of an error page is repeated.
MAX_ERROR_PAGE = 200
GIVE_KEY = "Give --api-key, or set SGLANG_API_KEY."
#: Starts each line of a stream that has content.
DATA = "data: "


class ServerRefused(UserError):
    """The server answered with an error; the message is the server's own."""


class ServerGone(UserError):
    """The server does not answer."""


class Client:
    """Talks to a server on this machine.

    - It never goes through a proxy.
    - An error that the server answers raises ServerRefused, with the server's own sentence.
    - A missing or wrong key raises UserError, which says how to give one.
    - A server that does not answer, or stops answering, raises ServerGone.
    """

    def __init__(self, url: str, key: str = "") -> None:
        self.url, self._key = url, key
        self.shown_url = url_without_account(url)
        """For messages."""
        self.answer_id = ""
        """The id of the answer that `chat` has read last."""
        try:
            split_url(url)
        except ValueError as error:
            raise UserError(f"{self.shown_url} is not the URL of a server: {error}.") from None
        self._http = httpx.Client(base_url=url, headers=key_header(key), timeout=ANSWER_SECONDS, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def ready(self) -> dict[str, Any]:
        """What the server says about itself; see `ready_state`."""
        return ready_state(self.url, self._key)

    def model(self) -> dict[str, Any]:
        """The model that the server serves, as `/v1/models` describes it."""
        with self._ask("GET", "/v1/models") as response:
            try:
                model = json.loads(response.read())["data"][0]
                return {"id": str(model["id"]), "max_input_tokens": int(model["max_input_tokens"])}
            except (ValueError, KeyError, IndexError, TypeError, RecursionError):
                raise UserError(f"The server at {self.shown_url} is not a server of openclaw-rl.") from None

    def roll_back(self, version: int | None, *, retrain: bool = False) -> int:
        """Roll back to a policy version, or to the previous checkpoint; returns the version that serves now.

        With `retrain`, to the newest that was not trained on deleted turns, and train later ones anew.
        """
        with self._ask("POST", "/v1/policy/rollback", {"version": version, "retrain": retrain}) as response:
            return int(json.loads(response.read())["policy_version"])

    def rate(self, answer_id: str, thumb: str, text: str = "") -> None:
        """Rate an answer: `up` or `down`, and why."""
        with self._ask("POST", "/v1/feedback", {"id": answer_id, "thumb": thumb, "text": text}):
            pass

    def chat(self, messages: Sequence[Mapping[str, str]], **fields: Any) -> Iterator[dict[str, Any]]:
        """The pieces of an answer, as they are written. `fields` are further fields of the request."""
        body = {"messages": messages, "stream": True, **fields}
        with self._ask("POST", "/v1/chat/completions", body) as response:
            for line in response.iter_lines():
                if line.startswith(DATA + "{"):
                    event = json.loads(line.removeprefix(DATA))
                    if "error" in event:
                        raise ServerRefused(event["error"]["message"])
                    self.answer_id = event["id"]
                    yield from (choice["delta"] for choice in event["choices"])

    @contextlib.contextmanager
    def _ask(self, method: str, path: str, body: Any = None) -> Iterator[httpx.Response]:
        try:
            with self._http.stream(method, path, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    sentence, _code = read_error(response)
                    if response.status_code == httpx.codes.UNAUTHORIZED:
                        raise UserError(f"{sentence} {GIVE_KEY}")
                    raise ServerRefused(sentence)
                yield response
        except httpx.HTTPError as error:
            reason = str(error) or type(error).__name__
            raise ServerGone(
                f"The server at {self.shown_url} does not answer: {reason}. Is it still running?"
            ) from None


def ready_state(url: str, key: str = "", timeout: float = PROBE_SECONDS) -> dict[str, Any]:
    """What a server says about itself (`/readyz`), ready or not; empty if it says nothing that can be understood.

    Without a key, a server that has keys says only whether it is ready.
    """
    try:
        # Never through a proxy: the server is on this machine.
        state = httpx.get(f"{url}/readyz", headers=key_header(key), timeout=timeout, trust_env=False).json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError):
        return {}
    return state if isinstance(state, dict) else {}


def key_header(key: str) -> dict[str, str]:
    """The header that gives an API key, if there is one. A key from a file often ends with a newline."""
    return {"Authorization": f"Bearer {key.strip()}"} if key.strip() else {}


class ErrorAnswer(Protocol):
    """An answer of either HTTP client."""

    @property
    def text(self) -> str: ...
    def json(self) -> Any: ...


def read_error(response: ErrorAnswer) -> tuple[str, Any]:
    """The message and the code of an error in OpenAI's shape; else the beginning of the answer, and no code."""
    try:
        error = response.json()["error"]
        return str(error["message"]), error.get("code")
    except (ValueError, KeyError, TypeError, RecursionError):
        return response.text[:MAX_ERROR_PAGE], None
