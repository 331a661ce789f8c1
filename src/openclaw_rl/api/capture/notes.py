"""Which notes a request is answered with."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from openclaw_rl.ledger.note_keeper import NoteKeeper
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message, RenderedPrompt
from openclaw_rl.rendering.history import TemplateInput
from openclaw_rl.rendering.notes import with_notes
from openclaw_rl.types import ConversationNote, Note, NoteState

log = logging.getLogger(__name__)

HEADER = "x-notes"
OFF = ("off", "0", "false", "no")


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


@dataclass(frozen=True, slots=True)
class NotedChat:
    """A conversation with its notes, rendered as the client sent it."""

    chat: TemplateInput
    prompt: RenderedPrompt


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

    def __init__(self, notes: NoteKeeper, renderer: ChatRenderer, probes_every: int, seed: int) -> None:
        """`probes_every` 0: no note is withheld."""
        self.notes, self.renderer = notes, renderer
        self.probes_every, self.seed = probes_every, seed

    def begin(self, owner: str) -> RequestNotes:
        """The notes of a conversation that begins."""
        return RequestNotes([self._for_conversation(note, count) for note, count in self.notes.begin(owner)])

    def current(self, owner: str) -> RequestNotes:
        """The owner's active notes, for a request that is not recorded."""
        active = [note for note, _count in self.notes.begin(owner) if note.state is NoteState.ACTIVE]
        return RequestNotes([ConversationNote(note.number, note.text, given=True) for note in active])

    def proceed(self, turn: int) -> RequestNotes:
        """The notes of a conversation that continues a turn."""
        began, notes = self.notes.of_conversation(turn)
        return RequestNotes(notes, began)

    def write(self, chat: TemplateInput, notes: RequestNotes, max_tokens: int) -> NotedChat | None:
        """A conversation with its notes; None if there are none, or if it must be answered without them."""
        if not notes.texts:
            return None
        try:
            noted = chat._replace(messages=self.messages(chat.messages, notes))
            prompt = self.renderer.prompt(self.renderer.text(*noted))
        except ChatError as error:
            log.warning("A conversation is answered without its notes: %s", error)
            return None
        return NotedChat(noted, prompt) if len(prompt.ids) < max_tokens else None

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


def switched_off(headers: Mapping[str, str]) -> bool:
    """Whether the client wants this one request answered without notes."""
    return (headers.get(HEADER) or "").strip().lower() in OFF
