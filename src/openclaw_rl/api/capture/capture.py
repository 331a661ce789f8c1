"""Looks at a request before it is answered: its session, its kind, the recorded turn that it continues or reacts to."""

import contextlib
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from openclaw_rl.api.capture.classify import FROM_HISTORY, kind_of, new_session_name, truthy
from openclaw_rl.api.capture.note_giver import NoteGiver
from openclaw_rl.api.capture.turn import OpenTurn, PromptMaker
from openclaw_rl.api.reader import IncomingRequest
from openclaw_rl.api.server_metrics import ServerMetrics
from openclaw_rl.api.wire import TextRequest
from openclaw_rl.ledger.errors import DamagedTurn, LedgerError
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import find_ancestor, last_waiting, load_turn, main_turn, set_next_state
from openclaw_rl.rendering import history
from openclaw_rl.rendering.chat import Message, RenderedPrompt, Renderer, content_text
from openclaw_rl.rendering.clients import (
    OPENCODE,
    SUMMARY,
    client_purpose,
    is_passing,
    message_words,
    user_words,
    without_quotes,
)
from openclaw_rl.types import SessionKey, StoredTurn

log = logging.getLogger(__name__)


class Capture:
    """Records requests and their answers in the ledger.

    - No request fails because of it. If the ledger cannot be read or written, or anything else goes wrong, the request
      is answered, the turn is counted as lost, and the log says why.
    - A turn's prompt is what the model was given, token for token. Where the history of a request is a recorded turn,
      its recorded tokens are used, also if the client changed the form of what it sends back.
    - A main request becomes the next state of the turn that it reacts to (`find_reaction` has the rules). A text that
      is continued (`TextRequest`) is no reaction and has none: only feedback or a reward judges it.
    - Users who have said the same so far stay apart: a request continues a turn that no other request continues, if
      there is one.
    - A main request of a chat gets its conversation's notes; its turn has the exact prompts with and without them. A
      request that is not recorded gets the owner's notes of today.
    - A request with `store: false` is not recorded, unless it has the header `X-Store: 1`: Codex always sends the
      former, and its owner can configure the latter.
    """

    def __init__(
        self, ledger: Ledger, renderer: Renderer, metrics: ServerMetrics, notes: NoteGiver | None = None
    ) -> None:
        """Without `notes`, no request gets notes."""
        self.ledger = ledger
        self.metrics = metrics
        self._prompts = PromptMaker(ledger, renderer, notes)
        metrics.gauge(
            "openclaw_capture_suspended",
            "1 while the ledger cannot be written.",
            lambda: ledger.suspended is not None,
        )
        self._continued: set[int] = set()
        self._lock = threading.Lock()

    def open(self, incoming: IncomingRequest) -> tuple[RenderedPrompt, OpenTurn | None]:
        """The prompt, and the turn that begins: None if the request is not to be recorded, or cannot be now.

        Requests are taken in turn, whatever thread they come from.
        """
        with self._lock:
            return self._open(incoming)

    def _open(self, incoming: IncomingRequest) -> tuple[RenderedPrompt, OpenTurn | None]:
        try:
            if not is_recorded(incoming):
                return self._prompts.unrecorded(incoming), None
            turn = self._place(incoming)
            try:
                self._react(turn)
                self._prompts.choose(turn)
            except DamagedTurn as error:
                log.warning("A conversation begins anew: %s", error)
                turn.ancestor = None
                self._prompts.choose(turn)
            self.metrics.continuations[turn.continuation].inc()
            if turn.parent is not None:
                self._continued.add(turn.parent)
            return turn.prompt, turn
        except LedgerError as error:
            log.warning("A turn is not captured: %s", error)
        except Exception:
            # A bug in capture. The client still gets an answer, and the traceback helps to fix the bug.
            log.exception("A turn is not captured.")
        self.metrics.lost_turns.inc()
        return incoming.prompt, None

    def prompt(self, incoming: IncomingRequest) -> RenderedPrompt:
        """The prompt with which a request would be answered. Records nothing."""
        with contextlib.suppress(LedgerError), self._lock:
            if not is_recorded(incoming):
                return self._prompts.unrecorded(incoming)
            turn = self._place(incoming)
            self._prompts.choose(turn)
            return turn.prompt
        return incoming.prompt

    def _place(self, incoming: IncomingRequest) -> OpenTurn:
        """The open turn of a request: where it stands among the recorded turns."""
        request = incoming.request
        messages = incoming.chat.messages
        # A text has other tokens than a chat of the same words, so no chat may continue it.
        owner = f"{incoming.owner} text" if isinstance(request, TextRequest) else incoming.owner
        keys = history.keys(owner, messages)
        in_episode = incoming.episode is not None
        name, source = incoming.session or (None, FROM_HISTORY)
        ancestor = self.ledger.read(find_ancestor, incoming.owner, keys.ends, name, self._continued)
        kind, reason = kind_of(incoming.headers, request, messages, in_episode=in_episode)
        if name is None:
            name = ancestor.session.id if ancestor else new_session_name()
        return OpenTurn(
            ledger=self.ledger,
            metrics=self.metrics,
            continued=self._continued,
            incoming=incoming,
            session=SessionKey(incoming.owner, name),
            session_source=source,
            kind=kind,
            kind_reason=reason,
            request_key=keys.request,
            ancestor=ancestor,
            prompt=incoming.prompt,
        )

    def _react(self, turn: OpenTurn) -> None:
        """Make the request the next state of the turn that it reacts to. The request does not wait for that."""
        if turn.is_chat and (reaction := find_reaction(turn)):
            number, said = reaction
            if turn.incoming.headers.get("user-agent", "").startswith(OPENCODE):
                said = [m if m["role"] == "tool" else m | {"content": without_quotes(m["content"])} for m in said]
            self.ledger.submit_unawaited(set_next_state, number, said).add_done_callback(report_failure)


def is_recorded(incoming: IncomingRequest) -> bool:
    """Whether the client lets a request be recorded."""
    return incoming.request.store is not False or truthy(incoming.headers.get("x-store"))


def report_failure(written: "Future[None]") -> None:
    """Log that a next state was lost."""
    if error := written.exception():
        log.warning("A next state is not captured: %s", error)


#: The turn, and the messages that are its next state.
Reaction = tuple[int, list[Message]]


def find_reaction(turn: OpenTurn) -> Reaction | None:
    """The turn that a main request reacts to, with its next state; None if there is no such turn.

    A client sends back the answers that it was given. The `ancestor` is the newest of them that is recognised with all
    that was said before it; `newest` is the last answer in the request, recognised or not.

    - If the ancestor has no next state yet, the messages after it are its next state, up to the next answer.
    - Otherwise, if the newest answer was not recognised, the client has changed the answer or the words before it. The
      last waiting turn that continues the ancestor is meant. If the client does not name the session, the turn must
      also have the same answer, or must have been asked the same, as the newest answer in the request.
    - Without an ancestor the client has cut its history. The last waiting turn of the session is meant, on the same
      condition. If no answer is left, the client's summary must stand in its place.
    - If the newest answer was recognised and has a next state, then the user went back and took another way, and no
      turn gets a next state. Clients that name the session may also delete an answer (OpenClaw does if it is empty or
      NO_REPLY): then the words that the waiting turn was asked stand before the new ones, and only the new ones count.
    - A request that the waiting turn answered already is a retry, which says nothing about the answer.
    - Only words of users and results of tools are a next state. System messages, messages that the client writes by
      itself and commands to the client never are.
    """
    ledger = turn.ledger
    ancestor = turn.ancestor
    if ancestor is not None:
        # A side turn in between gets no next state, even if the client keeps it in its history.
        main = ancestor.main or ledger.read(main_turn, ancestor.number)
        if main is None:
            return None
        if not main.has_next_state:
            return reaction(main.number, next_state(turn.incoming.chat.messages[ancestor.depth :]))
    waiting = ledger.read(last_waiting, turn.session, turn.parent)
    return None if waiting is None else reaction_to(ledger.read(load_turn, waiting), turn)


def reaction_to(waiting: StoredTurn, turn: OpenTurn) -> Reaction | None:
    """What a request says about a turn that waits for its next state, if it says anything about it."""
    messages = turn.incoming.chat.messages
    request = [message for message in waiting.messages if message["role"] != "tools"]
    if history.keys(turn.session.owner, request).request == turn.request_key:
        return None
    newest = last_answer(messages)
    asked = next_state(request[last_answer(request) :])
    # Codex keeps older words before its summary; they were said about other answers.
    new = next_state(messages[max(newest, last_summary(messages)) :])
    if newest_answer_is(waiting.message, asked, turn, earlier_answers=count_answers(request)):
        return reaction(waiting.number, new)
    is_deleted = turn.is_named and count_answers(messages) <= count_answers(request)
    return reaction(waiting.number, without_beginning(new, asked)) if is_deleted else None


def newest_answer_is(answer: Message, asked: list[Message], turn: OpenTurn, *, earlier_answers: int) -> bool:
    """Whether the answer to `asked` is the newest one in a request's history, although it was not recognised."""
    messages = turn.incoming.chat.messages
    ancestor = turn.ancestor
    newest = last_answer(messages)
    if not newest:
        return last_summary(messages) > 0
    if ancestor is not None:
        if ancestor.depth == newest:
            return False
        if turn.is_named and count_answers(messages) > earlier_answers:
            return True
    before = messages[: newest - 1]
    same_question = next_state(before[last_answer(before) :]) == asked
    return same_question or history.meaning(messages[newest - 1]) == history.meaning(answer)


def reaction(turn: int, messages: list[Message]) -> Reaction | None:
    return (turn, messages) if messages else None


def last_answer(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many messages there are up to the last answer, the answer included; 0 if there is none."""
    return max((i for i, message in enumerate(messages, start=1) if message["role"] == "assistant"), default=0)


def last_summary(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many messages there are up to the client's last summary, the summary included; 0 if there is none."""
    purposes = (client_purpose(content_text(message.get("content"))) for message in messages)
    return max((i for i, purpose in enumerate(purposes, start=1) if purpose == SUMMARY), default=0)


def count_answers(messages: Sequence[Mapping[str, Any]]) -> int:
    return sum(message["role"] == "assistant" for message in messages)


def next_state(messages: Sequence[Message]) -> list[Message]:
    """The first words of users and results of tools among these messages, up to an answer to them."""
    said: list[Message] = []
    for message in messages:
        if message["role"] == "assistant" and said:
            break
        if message["role"] == "tool" or (message["role"] == "user" and is_a_persons(message)):
            said.append({**message, "content": message_words(message)})
    return said


def is_a_persons(message: Message) -> bool:
    return not is_passing(message) and client_purpose(content_text(message.get("content"))) is None


def without_beginning(new: list[Message], asked: list[Message]) -> list[Message]:
    """What follows in `new` after the messages of `asked`; nothing if it does not begin with them."""
    if not asked or new[: len(asked) - 1] != asked[:-1] or len(new) < len(asked):
        return []
    first = new[len(asked) - 1]
    last = asked[-1]
    if not first["content"].startswith(last["content"]):
        return []
    # Clients merge the messages around a deleted answer into one.
    rest = first["content"][len(last["content"]) :]
    if rest and not rest.startswith("\n"):
        return []
    words = user_words(rest.lstrip())
    return [*([{**first, "content": words}] if words else []), *new[len(asked) :]]
