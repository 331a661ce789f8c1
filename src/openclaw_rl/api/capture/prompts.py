"""The prompt of a request: what the client sent, the recorded tokens that it continues, and notes."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b

from openclaw_rl.api.capture.classify import SYSTEM_ROLES, kind_of
from openclaw_rl.api.capture.turn import OpenTurn
from openclaw_rl.api.reader import IncomingRequest
from openclaw_rl.api.wire import TextRequest
from openclaw_rl.ledger import notes as kept
from openclaw_rl.ledger import turns
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.packing import common_prefix
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import Ancestor
from openclaw_rl.rendering import history
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message, RenderedPrompt, content_text
from openclaw_rl.types import Continuation, ConversationNote, Note, NoteState, TurnKind

log = logging.getLogger(__name__)

#: The header with which a client wants one request answered without notes, and its values.
NOTES_HEADER = "x-notes"
NOTES_OFF = ("off", "0", "false", "no")


@dataclass(frozen=True, slots=True)
class RequestNotes:
    """The notes of the conversation that a request belongs to."""

    notes: Sequence[ConversationNote] = ()
    began: int | None = None
    """The turn with which the conversation began; None if it begins with this request."""
    used: bool = True
    """False if this one request is answered without notes."""

    @property
    def texts(self) -> list[str]:
        """The notes that the model is given."""
        return [note.text for note in self.notes if note.given] if self.used else []


NO_NOTES = RequestNotes(used=False)


class NoteGiver:
    """Chooses the notes of requests and writes them into prompts.

    - A conversation keeps the notes that it began with, word for word, so that its prompts extend each other. A new
      note reaches the owner's next conversation.
    - A note is withheld from one conversation in `probes_every`, to see whether the policy does without it. Which one
      follows from the seed, the note and how many conversations had it before. The first `probes_every` conversations
      have the note, and a pinned note is never withheld.
    - A conversation that the model's template does not accept with notes, or that does not fit the context with them,
      is answered without them.
    """

    def __init__(self, ledger: Ledger, renderer: ChatRenderer, probes_every: int, seed: int) -> None:
        """`probes_every` 0: no note is withheld."""
        self.ledger = ledger
        self.renderer = renderer
        self.probes_every = probes_every
        self.seed = seed

    def begin(self, owner: str) -> RequestNotes:
        """The notes of a conversation that begins."""
        return RequestNotes(
            [self._for_conversation(note, count) for note, count in self.ledger.read(kept.for_new_conversation, owner)]
        )

    def current(self, owner: str) -> RequestNotes:
        """The owner's active notes, for a request that is not recorded."""
        active = [
            note
            for note, _count in self.ledger.read(kept.for_new_conversation, owner)
            if note.state is NoteState.ACTIVE
        ]
        return RequestNotes([ConversationNote(note.number, note.text, given=True) for note in active])

    def proceed(self, turn: int) -> RequestNotes:
        """The notes of a conversation that continues a turn."""
        began, notes = self.ledger.read(kept.of_conversation, turn)
        return RequestNotes(notes, began)

    def write(self, incoming: IncomingRequest, notes: RequestNotes) -> IncomingRequest | None:
        """The request as if the client had sent the notes; None without notes, or if it must be answered without."""
        if not notes.texts:
            return None
        try:
            chat = incoming.chat._replace(messages=self.messages(incoming.chat.messages, notes))
            prompt = self.renderer.prompt(self.renderer.text(*chat))
        except ChatError as error:
            log.warning("A conversation is answered without its notes: %s", error)
            return None
        return replace(incoming, chat=chat, prompt=prompt) if len(prompt.ids) < incoming.max_context_tokens else None

    def messages(self, messages: Sequence[Message], notes: RequestNotes) -> list[Message]:
        return with_notes(messages, notes.texts, self.renderer.default_system)

    def _for_conversation(self, note: Note, conversations: int) -> ConversationNote:
        given = note.pinned or (note.state is NoteState.ACTIVE and not self._is_withheld(note, conversations))
        return ConversationNote(note.number, note.text, given)

    def _is_withheld(self, note: Note, conversations: int) -> bool:
        if not self.probes_every:
            return False
        round_number, place = divmod(conversations, self.probes_every)
        text = f"{self.seed} {note.number} {round_number}".encode()
        drawn = int.from_bytes(blake2b(text, digest_size=8).digest()) % self.probes_every
        return round_number > 0 and place == drawn


@dataclass(frozen=True, slots=True)
class PromptMaker:
    """Makes the prompts of one server's requests.

    Where the history of a request is a recorded turn, its recorded tokens are used, with notes and without them.
    """

    ledger: Ledger
    renderer: ChatRenderer
    notes: NoteGiver | None

    def choose(self, turn: OpenTurn) -> None:
        """Give an open turn its notes and its prompt, which continues the turn's ancestor."""
        incoming = turn.incoming
        ancestor = turn.ancestor
        notes = self._notes(turn)
        noted = self.notes.write(incoming, notes) if self.notes else None
        if ancestor is None:
            turn.notes = notes.notes if noted or not notes.texts else ()
            if noted is not None:
                turn.prompt = noted.prompt
                turn.ids_without_notes = incoming.prompt.ids
            return
        turn.notes_from = notes.began
        recorded = self.ledger.sequence(ancestor.number)
        without_notes = recorded
        if notes.began is not None:
            without_notes = self.ledger.read(turns.sequence_without_notes, ancestor.number)
        turn.prompt, turn.continuation = self._continue(
            incoming, ancestor.depth, self._recorded(ancestor, without_notes)
        )
        if noted is not None:
            turn.ids_without_notes = turn.prompt.ids
            turn.prompt = noted.prompt
            turn.continuation = Continuation.FORKED
            # If the ancestor was answered without notes, there are no recorded tokens that have them.
            if without_notes != recorded and self.notes is not None:
                earlier = self._recorded(ancestor, recorded, partial(self.notes.messages, notes=notes))
                added = len(noted.chat.messages) - len(incoming.chat.messages)
                turn.prompt, turn.continuation = self._continue(noted, ancestor.depth + added, earlier)
        turn.shared_tokens = common_prefix(turn.prompt.ids, recorded)

    def unrecorded(self, incoming: IncomingRequest) -> RenderedPrompt:
        """The prompt of a request that is not recorded: with the owner's notes of today."""
        kind, _reason = kind_of(incoming.headers, incoming.request, incoming.chat.messages)
        if self.notes is not None and takes_notes(incoming, kind):
            with contextlib.suppress(LedgerError):
                if noted := self.notes.write(incoming, self.notes.current(incoming.owner)):
                    return noted.prompt
        return incoming.prompt

    def _notes(self, turn: OpenTurn) -> RequestNotes:
        """The notes of the turn's conversation."""
        if self.notes is None:
            return NO_NOTES
        used = takes_notes(turn.incoming, turn.kind)
        if turn.ancestor is not None:
            return replace(self.notes.proceed(turn.ancestor.number), used=used)
        return self.notes.begin(turn.incoming.owner) if used else NO_NOTES

    def _continue(
        self, incoming: IncomingRequest, covered: int, turn: history.RecordedTurn
    ) -> tuple[RenderedPrompt, Continuation]:
        """The prompt of a request whose first `covered` messages end with a recorded turn's response."""
        prompt, continuation = history.continue_turn(self.renderer, incoming.chat, incoming.prompt, covered, turn)
        if continuation is Continuation.REALIGNED and len(prompt.ids) >= incoming.max_context_tokens:
            # The record includes thoughts that the client left out; with them there is no room for an answer.
            return incoming.prompt, Continuation.FORKED
        return prompt, continuation

    def _recorded(
        self, ancestor: Ancestor, ids: list[int], change: Callable[[Sequence[Message]], list[Message]] = list
    ) -> history.RecordedTurn:
        """A recorded turn with these tokens; `change` is made to the messages of its request."""

        def request() -> list[Message]:
            messages = self.ledger.read(turns.request, ancestor.number)
            tools = messages[:1] if messages[0]["role"] == "tools" else []
            return [*tools, *change(messages[len(tools) :])]

        return history.RecordedTurn(
            ids=ids,
            response=self.ledger.read(turns.response, ancestor.number),
            request=request,
            earlier=lambda: self.ledger.read(turns.earlier_responses, ancestor.number),
        )


def takes_notes(incoming: IncomingRequest, kind: TurnKind) -> bool:
    """Whether a request is one of a chat with a person, which its notes are meant for, and lets itself have them."""
    is_chat = kind is TurnKind.MAIN and not isinstance(incoming.request, TextRequest) and incoming.episode is None
    return is_chat and (incoming.headers.get(NOTES_HEADER) or "").strip().lower() not in NOTES_OFF


def with_notes(messages: Sequence[Message], notes: Sequence[str], default_system: str = "") -> list[Message]:
    """A conversation with notes at the end of its first system message, a line for each.

    They stand there as instructions. Under a heading that says where they come from, a small model keeps to them half
    as often (docs/results/notes.md).

    What stands before them stays as it is, so that a cached prefix is used. If there is no system message, one is
    added, which begins with the text that the model's template would write in its place (`default_system`).
    """
    block = "\n".join(notes)
    place = next((i for i, message in enumerate(messages) if message["role"] in SYSTEM_ROLES), None)
    if place is None:
        return [{"role": "system", "content": joined(default_system, block)}, *messages]
    text = content_text(messages[place].get("content"))
    return [*messages[:place], {**messages[place], "content": joined(text, block)}, *messages[place + 1 :]]


def joined(text: str, block: str) -> str:
    return f"{text}\n\n{block}" if text else block
