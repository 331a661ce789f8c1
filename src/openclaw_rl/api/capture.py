"""Every answered request becomes a turn in the ledger, without anyone doing anything.

`Capture.open` looks at a request before it is answered: whose session it is, what it is, which recorded turn it
goes on from and with which tokens. What it returns records the answer when there is one. Nothing here can fail a
request: when the ledger cannot be read or written, or anything else goes wrong, requests are served and not captured.
"""

import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from openclaw_rl.api.classify import classify, is_transient
from openclaw_rl.api.metrics import Metrics
from openclaw_rl.api.sessions import named_session, new_session
from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.ledger.packing import common_prefix
from openclaw_rl.ledger.queries import Ancestor
from openclaw_rl.ledger.writer import LedgerError
from openclaw_rl.rendering import history
from openclaw_rl.rendering.chat import ChatRenderer, Message, Prompt, content_text
from openclaw_rl.rendering.clients import user_words
from openclaw_rl.types import Continuation, Likeliest, SampledToken, SamplingParams, SessionKey, Turn, TurnKind

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice of an answered request."""

    tokens: Sequence[SampledToken]
    message: Mapping[str, Any]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request that is about to be answered, rendered as it came."""

    owner: str
    headers: Mapping[str, str]
    request: ChatRequest
    conversation: history.Conversation
    plain: Prompt
    context: int
    """How many tokens the model can take, its answer included."""


class Capture:
    """The way from requests to the ledger."""

    def __init__(self, ledger: Ledger, renderer: ChatRenderer, metrics: Metrics) -> None:
        self.ledger, self.renderer, self.metrics = ledger, renderer, metrics
        metrics.gauge(
            "openclaw_capture_suspended",
            "1 while the ledger cannot be written.",
            lambda: ledger.writer.suspended is not None,
        )
        self._claimed: set[int] = set()

    def open(self, incoming: Incoming) -> "OpenTurn | None":
        """Begin a turn; None if it is not to be recorded, or cannot be now."""
        if incoming.request.store is False:
            return None
        try:
            return self._open(incoming)
        except LedgerError as error:
            log.warning("A turn is not captured: %s", error)
        except Exception:
            # A fault of ours: the client can be answered all the same, and whoever mends it needs the traceback.
            log.exception("A turn is not captured.")
        self.metrics.lost_turns.inc()
        return None

    def _open(self, incoming: Incoming) -> "OpenTurn":
        request, messages = incoming.request, incoming.conversation.messages
        transient = [is_transient(message) for message in messages]
        keys = history.keys(incoming.owner, messages, transient)
        named = named_session(incoming.headers, request, messages)
        ancestor = self.ledger.find_ancestor(incoming.owner, keys.ends, named[0] if named else None, self._claimed)
        name, source = named or ((ancestor.session.id, "history") if ancestor else new_session())
        session = SessionKey(incoming.owner, name)
        kind, reason = kind_of(incoming.headers, request, messages)
        if kind is TurnKind.MAIN:
            self._tell_the_turn_before(session, messages, transient, ancestor, keys.request)
        prompt, continuation, keep = self._prompt(incoming, ancestor)
        self.metrics.continuations[continuation].inc()
        if ancestor is not None:
            self._claimed.add(ancestor.number)
        tools = incoming.conversation.tools
        return OpenTurn(
            capture=self,
            prompt=prompt,
            session=session,
            source=source,
            kind=kind,
            kind_reason=reason,
            messages=[{"role": "tools", "tools": tools}, *messages] if tools else list(messages),
            parent=ancestor.number if ancestor else None,
            keep=keep,
            continuation=continuation,
            request_key=keys.request,
            ends_session=truthy(incoming.headers.get("x-session-done")) or bool(request.session_done),
        )

    def _prompt(self, incoming: Incoming, ancestor: Ancestor | None) -> tuple[Prompt, Continuation, int]:
        """The prompt, how it goes on from the turn before, and how many tokens the two have in common."""
        if ancestor is None:
            return incoming.plain, Continuation.NEW, 0
        turn = history.Recorded(
            ids=self.ledger.sequence(ancestor.number),
            response=self.ledger.response(ancestor.number),
            request=partial(self.ledger.request, ancestor.number),
            earlier=partial(self.ledger.earlier_responses, ancestor.number),
        )
        prompt, continuation = history.go_on(self.renderer, incoming.conversation, incoming.plain, ancestor.depth, turn)
        if continuation is Continuation.REALIGNED and len(prompt.ids) >= incoming.context:
            # The record has thoughts that the client left out, and with them no room for an answer.
            prompt, continuation = incoming.plain, Continuation.FORKED
        return prompt, continuation, common_prefix(prompt.ids, turn.ids)

    def _tell_the_turn_before(
        self,
        session: SessionKey,
        messages: Sequence[Message],
        transient: Sequence[bool],
        ancestor: Ancestor | None,
        request_key: bytes,
    ) -> None:
        """This request is what came next for the turn it goes on from."""
        if ancestor is None:
            # The client cut or rewrote its history, but says that the session goes on.
            number = self._last_waiting(session, request_key)
            answered = [i for i, message in enumerate(messages, start=1) if message["role"] == "assistant"]
            covered = answered[-1] if answered else 0
        else:
            # What a client does for itself in between, and keeps in its history, is nobody's next state.
            number, covered = self.ledger.main_turn(ancestor.number), ancestor.depth
        if number is not None:
            after = zip(messages[covered:], transient[covered:], strict=True)
            came = [next_state_message(message) for message, passing in after if not passing]
            # The request does not wait for this to be written.
            self.ledger.set_next_state(number, came).add_done_callback(report_failure)

    def _last_waiting(self, session: SessionKey, request_key: bytes) -> int | None:
        """The newest turn of a session that waits for what comes next; None if it answered this very request.

        Asking again is no feedback, and what came before was told by the first attempt.
        """
        number = self.ledger.last_waiting(session)
        if number is None:
            return None
        asked = [message for message in self.ledger.request(number) if message["role"] != "tools"]
        answered = history.keys(session.owner, asked, [is_transient(message) for message in asked])
        return None if answered.request == request_key else number

    def release(self, turn: int | None) -> None:
        """A request that went on from this turn is over."""
        if turn is not None:
            self._claimed.discard(turn)


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A request on its way to becoming a turn (or several, with n > 1)."""

    capture: Capture
    prompt: Prompt
    session: SessionKey
    source: str
    kind: TurnKind
    kind_reason: str
    messages: list[Message]
    parent: int | None
    keep: int
    continuation: Continuation
    request_key: bytes
    ends_session: bool

    async def record(self, completion: str, version: int, sampling: SamplingParams, answers: Sequence[Answer]) -> None:
        """Store the answers; returns when they are durable, or when it is known that they cannot be stored."""
        ledger, metrics = self.capture.ledger, self.capture.metrics
        try:
            turns = [self._turn(completion, version, sampling, i, answer) for i, answer in enumerate(answers)]
            await ledger.capture(turns, self.source, self.parent, self.keep, done=self.ends_session)
            metrics.captured_turns[self.kind].inc(len(turns))
        except LedgerError as error:
            log.warning("A turn is not captured: %s", error)
            metrics.lost_turns.inc(len(answers))
        except Exception:
            # Whatever it is: the answer is the client's.
            log.exception("A turn is not captured.")
            metrics.lost_turns.inc(len(answers))

    def close(self) -> None:
        """The request is over, answered or not."""
        self.capture.release(self.parent)

    def _turn(self, completion: str, version: int, sampling: SamplingParams, choice: int, answer: Answer) -> Turn:
        return Turn(
            completion=completion,
            choice=choice,
            session=self.session,
            kind=self.kind,
            kind_reason=self.kind_reason,
            version=version,
            messages=self.messages,
            message=answer.message,
            prompt_ids=self.prompt.ids,
            response_ids=[token.token_id for token in answer.tokens],
            logprobs=[token.logprob for token in answer.tokens],
            sampling=sampling,
            finish_reason=answer.finish_reason,
            continuation=self.continuation,
            parent=self.parent,
            request_key=self.request_key,
            end_key=history.extend(self.request_key, answer.message),
            top=likeliest(answer.tokens, sampling.top_logprobs),
        )


def likeliest(tokens: Sequence[SampledToken], k: int) -> Likeliest | None:
    """What was likeliest at each token, where that was asked for and is there."""
    if not k or not tokens or any(len(token.top) < k for token in tokens):
        return None
    numbers = np.array([token.top[:k] for token in tokens])
    return Likeliest(numbers[:, :, 0].astype(np.int32), numbers[:, :, 1].astype(np.float32))


def report_failure(written: "Future[None]") -> None:
    """Say that a next state was lost."""
    if error := written.exception():
        log.warning("A next state is not captured: %s", error)


def kind_of(headers: Mapping[str, str], request: ChatRequest, messages: Sequence[Message]) -> tuple[TurnKind, str]:
    """What the client says the turn is, else what it looks like."""
    said = (headers.get("x-turn-type") or request.turn_type or "").lower()
    if said in (TurnKind.MAIN, TurnKind.SIDE):
        return TurnKind(said), "the client said so"
    return classify(messages, bool(request.tools))


def next_state_message(message: Message) -> Message:
    """A message as feedback: who said what."""
    text = content_text(message.get("content"))
    return {**message, "content": user_words(text) if message["role"] == "user" else text}


def truthy(text: str | None) -> bool:
    return (text or "").strip().lower() in ("1", "true", "yes")
