"""Looks at a request before it is answered: its session, its kind, the recorded turn that it continues, its tokens."""

import contextlib
import logging
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace

from openclaw_rl.api.capture.classify import kind_of
from openclaw_rl.api.capture.episodes import truthy
from openclaw_rl.api.capture.next_state import ReactionFinder
from openclaw_rl.api.capture.notes import NO_NOTES, NoteGiver, RequestNotes, switched_off
from openclaw_rl.api.capture.open_turn import OpenTurn
from openclaw_rl.api.capture.prompts import ChosenPrompt, PromptMaker
from openclaw_rl.api.capture.sessions import NamedSession, named_session, new_session
from openclaw_rl.api.metrics import ServerMetrics
from openclaw_rl.api.translated import TextRequest, TranslatedRequest
from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.ledger.queries import Ancestor
from openclaw_rl.rendering import history
from openclaw_rl.rendering.chat import ChatRenderer, RenderedPrompt
from openclaw_rl.types import EpisodeMode, SessionKey, TurnKind

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A request that is about to be answered."""

    owner: str
    headers: Mapping[str, str]
    request: ChatRequest
    chat: history.TemplateInput
    plain: RenderedPrompt
    """The chat as the client sent it, rendered."""
    max_context_tokens: int
    """The model's limit, answer included."""
    episode: EpisodeMode | None = None
    """Given if the request is part of an episode."""


@dataclass(frozen=True, slots=True)
class PlacedRequest:
    """Where a request stands among the recorded turns."""

    keys: history.ConversationKeys
    named: NamedSession | None
    """The session that the client names, and how it does."""
    ancestor: Ancestor | None
    """The turn that it continues."""
    kind: TurnKind
    kind_reason: str


class Capture:
    """Records requests and their answers in the ledger.

    - No request fails because of it. If the ledger cannot be read or written, or anything else goes wrong, the request
      is answered, the turn is counted as lost, and the log says why.
    - A turn's prompt is what the model was given, token for token. Where the history of a request is a recorded turn,
      its recorded tokens are used, also if the client changed the form of what it sends back.
    - A main request becomes the next state of the turn that it reacts to (`ReactionFinder` has the rules). A text that
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
        self.ledger, self.metrics, self.notes = ledger, metrics, notes
        self._prompts = PromptMaker(ledger, renderer, notes)
        metrics.gauge(
            "openclaw_capture_suspended",
            "1 while the ledger cannot be written.",
            lambda: ledger.writer.suspended is not None,
        )
        self._continued: set[int] = set()

    def open(self, incoming: IncomingRequest) -> tuple[RenderedPrompt, OpenTurn | None]:
        """The prompt, and the turn that begins: None if the request is not to be recorded, or cannot be now."""
        try:
            if not is_recorded(incoming):
                return self._unrecorded(incoming), None
            turn = self._open(incoming)
            return turn.chosen.prompt, turn
        except LedgerError as error:
            log.warning("A turn is not captured: %s", error)
        except Exception:
            # A bug in capture. The client still gets an answer, and the traceback helps to fix the bug.
            log.exception("A turn is not captured.")
        self.metrics.lost_turns.inc()
        return incoming.plain, None

    def prompt(self, incoming: IncomingRequest) -> RenderedPrompt:
        """The prompt with which a request would be answered. Records nothing."""
        with contextlib.suppress(LedgerError):
            if not is_recorded(incoming):
                return self._unrecorded(incoming)
            return self._choose(incoming, self._place(incoming)).prompt
        return incoming.plain

    def _open(self, incoming: IncomingRequest) -> OpenTurn:
        request, messages = incoming.request, incoming.chat.messages
        placed = self._place(incoming)
        named, ancestor = placed.named, placed.ancestor
        name, source = named or ((ancestor.session.id, "history") if ancestor else new_session())
        session = SessionKey(incoming.owner, name)
        if placed.kind is TurnKind.MAIN and not isinstance(request, TextRequest):
            finder = ReactionFinder(self.ledger, session, named is not None, messages, ancestor, placed.keys.request)
            if reaction := finder.find():
                # The request does not wait until this is written.
                self.ledger.set_next_state(*reaction).add_done_callback(report_failure)
        chosen = self._choose(incoming, placed)
        self.metrics.continuations[chosen.continuation].inc()
        if ancestor is not None:
            self._continued.add(ancestor.number)
        tools = incoming.chat.tools
        return OpenTurn(
            ledger=self.ledger,
            metrics=self.metrics,
            continued=self._continued,
            chosen=chosen,
            session=session,
            session_source=source,
            kind=placed.kind,
            kind_reason=placed.kind_reason,
            messages=[{"role": "tools", "tools": tools}, *messages] if tools else list(messages),
            parent=ancestor.number if ancestor else None,
            request_key=placed.keys.request,
            ends_session=truthy(incoming.headers.get("x-session-done")) or bool(request.session_done),
            episode=incoming.episode,
            details=request.details if isinstance(request, TranslatedRequest) else {},
        )

    def _place(self, incoming: IncomingRequest) -> PlacedRequest:
        request, messages = incoming.request, incoming.chat.messages
        # A text has other tokens than a chat of the same words, so no chat may continue it.
        owner = f"{incoming.owner} text" if isinstance(request, TextRequest) else incoming.owner
        keys = history.keys(owner, messages)
        in_episode = incoming.episode is not None
        named = named_session(incoming.headers, request, messages, in_episode=in_episode)
        ancestor = self.ledger.find_ancestor(incoming.owner, keys.ends, named[0] if named else None, self._continued)
        kind, reason = kind_of(incoming.headers, request, messages, in_episode=in_episode)
        return PlacedRequest(keys, named, ancestor, kind, reason)

    def _choose(self, incoming: IncomingRequest, placed: PlacedRequest) -> ChosenPrompt:
        notes = self._notes(incoming, placed.kind, placed.ancestor)
        return self._prompts.make(incoming.chat, incoming.plain, placed.ancestor, notes, incoming.max_context_tokens)

    def _unrecorded(self, incoming: IncomingRequest) -> RenderedPrompt:
        """The prompt of a request that is not recorded."""
        kind, _reason = kind_of(incoming.headers, incoming.request, incoming.chat.messages)
        if self.notes is None or not takes_notes(incoming, kind):
            return incoming.plain
        with contextlib.suppress(LedgerError):
            notes = self.notes.current(incoming.owner)
            if noted := self.notes.write(incoming.chat, notes, incoming.max_context_tokens):
                return noted.prompt
        return incoming.plain

    def _notes(self, incoming: IncomingRequest, kind: TurnKind, ancestor: Ancestor | None) -> RequestNotes:
        """The notes of the request's conversation."""
        if self.notes is None:
            return NO_NOTES
        used = takes_notes(incoming, kind)
        if ancestor is not None:
            return replace(self.notes.proceed(ancestor.number), used=used)
        return self.notes.begin(incoming.owner) if used else NO_NOTES


def is_recorded(incoming: IncomingRequest) -> bool:
    """Whether the client lets a request be recorded."""
    return incoming.request.store is not False or truthy(incoming.headers.get("x-store"))


def takes_notes(incoming: IncomingRequest, kind: TurnKind) -> bool:
    """Whether a request is one of a chat with a person, which its notes are meant for."""
    is_chat = kind is TurnKind.MAIN and not isinstance(incoming.request, TextRequest) and incoming.episode is None
    return is_chat and not switched_off(incoming.headers)


def report_failure(written: "Future[None]") -> None:
    """Log that a next state was lost."""
    if error := written.exception():
        log.warning("A next state is not captured: %s", error)
