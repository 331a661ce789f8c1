"""Looks at a request before it is answered: its session, its kind, the recorded turn that it continues, its tokens."""

import contextlib
import logging
from concurrent.futures import Future

from openclaw_rl.api.capture.classify import FROM_HISTORY, kind_of, named_session, new_session_name, truthy
from openclaw_rl.api.capture.next_state import find_reaction
from openclaw_rl.api.capture.prompts import NoteGiver, PromptMaker
from openclaw_rl.api.capture.turn import OpenTurn
from openclaw_rl.api.reader import IncomingRequest
from openclaw_rl.api.server_metrics import ServerMetrics
from openclaw_rl.api.wire import TextRequest
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import find_ancestor, set_next_state
from openclaw_rl.rendering import history
from openclaw_rl.rendering.chat import ChatRenderer, RenderedPrompt
from openclaw_rl.types import SessionKey

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
        self, ledger: Ledger, renderer: ChatRenderer, metrics: ServerMetrics, notes: NoteGiver | None = None
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

    def open(self, incoming: IncomingRequest) -> tuple[RenderedPrompt, OpenTurn | None]:
        """The prompt, and the turn that begins: None if the request is not to be recorded, or cannot be now."""
        try:
            if not is_recorded(incoming):
                return self._prompts.unrecorded(incoming), None
            turn = self._place(incoming)
            self._react(turn)
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
        with contextlib.suppress(LedgerError):
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
        name, source = named_session(incoming.headers, request, messages, in_episode=in_episode) or (None, FROM_HISTORY)
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
            self.ledger.submit(set_next_state, *reaction).add_done_callback(report_failure)


def is_recorded(incoming: IncomingRequest) -> bool:
    """Whether the client lets a request be recorded."""
    return incoming.request.store is not False or truthy(incoming.headers.get("x-store"))


def report_failure(written: "Future[None]") -> None:
    """Log that a next state was lost."""
    if error := written.exception():
        log.warning("A next state is not captured: %s", error)
