"""Which notes and examples a conversation has, and how they are written into its prompts."""

import logging
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b

from openclaw_rl.api.capture.classify import SYSTEM_ROLES
from openclaw_rl.api.reader import IncomingRequest
from openclaw_rl.api.wire import TextRequest
from openclaw_rl.ledger import examples
from openclaw_rl.ledger import notes as kept
from openclaw_rl.ledger.options import NotesOptions
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.rendering.chat import ChatError, ChatRenderer, Message, content_text
from openclaw_rl.rendering.clients import message_words
from openclaw_rl.types import ConversationNote, Note, NoteState, TurnKind

log = logging.getLogger(__name__)

#: The header with which a client wants one request answered without notes, and its values.
NOTES_HEADER = "x-notes"
NOTES_OFF = ("off", "0", "false", "no")


#: A request with examples in its prompt takes at most this share of the context, so that there is room to go on.
MAX_SHARE_WITH_EXAMPLES = 0.5
#: Letters of a word that are compared, so that "recipe" and "recipes" are one word.
STEM_LETTERS = 5
_WORD = re.compile(r"\w{3,}|\d+")


@dataclass(frozen=True, slots=True)
class RequestNotes:
    """The notes of the conversation that a request belongs to, examples among them."""

    notes: Sequence[ConversationNote] = ()
    began: int | None = None
    """The turn with which the conversation began; None if it begins with this request."""
    used: bool = True
    """False if this one request is answered without notes."""

    @property
    def given(self) -> list[ConversationNote]:
        """What the model is given."""
        return [note for note in self.notes if note.given] if self.used else []

    def without_examples(self) -> "RequestNotes":
        return replace(self, notes=[note for note in self.notes if not note.question])


NO_NOTES = RequestNotes(used=False)


class NoteGiver:
    """Chooses the notes and examples of requests and writes them into prompts.

    - A conversation keeps the notes that it began with, word for word, so that its prompts extend each other. A new
      note reaches the owner's next conversation.
    - A note is withheld from one conversation in `probes_every`, to see whether the policy does without it. Which one
      follows from the seed, the note and how many conversations had it before. The first `probes_every` conversations
      have the note, and a pinned note is never withheld. The same holds for examples; those that show a note are
      withheld with it.
    - Of many notes, those are given that apply to the request and are most like it, in at most `note_tokens` tokens.
    - At most `max_examples` examples are given: those that show the most notes, then the best, then the likest. None
      is given with tools, or if the prompt would take more than half of the context.
    - A conversation that the model's template does not accept with notes, or that does not fit the context with them,
      is answered without them.
    """

    def __init__(self, ledger: Ledger, renderer: ChatRenderer, options: NotesOptions, seed: int) -> None:
        self.ledger = ledger
        self.renderer = renderer
        self.options = options
        self.seed = seed
        self._count_tokens = lru_cache(4096)(lambda text: len(renderer.tokenizer.backend.encode(text).ids))

    def begin(self, incoming: IncomingRequest, *, probes: bool = True) -> RequestNotes:
        """The notes of a conversation that begins. Without `probes`, nothing is withheld that is in use."""
        in_use = self.ledger.read(kept.for_new_conversation, incoming.owner)
        if not in_use:
            return RequestNotes()
        request = stems(last_words(incoming.chat.messages))
        notes = self._choose_notes([note for note in in_use if not note.question], request)
        chosen = [*notes, *self._choose_examples(incoming, in_use, notes, request)]
        counts = self.ledger.read(kept.conversations, [note.number for note in chosen])
        draws = [note.pinned or not probes or not self._is_withheld(note, counts[note.number]) for note in chosen]
        withheld = {note.number for note, drawn in zip(chosen, draws, strict=True) if not drawn}
        links = self.ledger.read(examples.shown, incoming.owner) if withheld else {}
        return RequestNotes(
            [
                ConversationNote(
                    note.number,
                    note.text,
                    drawn
                    and (note.pinned or note.state is NoteState.ACTIVE)
                    and not links.get(note.number, set()) & withheld,
                    note.question,
                )
                for note, drawn in zip(chosen, draws, strict=True)
            ]
        )

    def proceed(self, turn: int) -> RequestNotes:
        """The notes of a conversation that continues a turn."""
        began, notes = self.ledger.read(kept.of_conversation, turn)
        return RequestNotes(notes, began)

    def write(self, incoming: IncomingRequest, notes: RequestNotes) -> IncomingRequest | None:
        """The request as if the client had sent the notes; None without notes, or if it must be answered without."""
        if not notes.given:
            return None
        try:
            chat = incoming.chat._replace(messages=self.messages(incoming.chat.messages, notes))
            prompt = self.renderer.prompt(self.renderer.text(*chat))
        except ChatError as error:
            log.warning("A conversation is answered without its notes: %s", error)
            return None
        return replace(incoming, chat=chat, prompt=prompt) if len(prompt.ids) < incoming.max_context_tokens else None

    def write_fitting(
        self, incoming: IncomingRequest, notes: RequestNotes
    ) -> tuple[IncomingRequest | None, RequestNotes]:
        """The request as `write` gives it, and its notes: without examples if they would fill the context."""
        noted = self.write(incoming, notes)
        if any(note.question for note in notes.given):
            room = MAX_SHARE_WITH_EXAMPLES * incoming.max_context_tokens
            if noted is None or len(noted.prompt.ids) > room:
                notes = notes.without_examples()
                noted = self.write(incoming, notes)
        return noted, notes

    def messages(self, messages: Sequence[Message], notes: RequestNotes) -> list[Message]:
        """A conversation with what the model is given: notes as instructions, examples as earlier exchanges."""
        texts = [note.text for note in notes.given if not note.question]
        noted = with_notes(messages, texts, self.renderer.default_system) if texts else list(messages)
        start = next((i for i, message in enumerate(noted) if message["role"] not in SYSTEM_ROLES), len(noted))
        exchanges = [
            {"role": role, "content": text}
            for note in notes.given
            if note.question
            for role, text in (("user", note.question), ("assistant", note.text))
        ]
        return [*noted[:start], *exchanges, *noted[start:]]

    def _choose_notes(self, notes: Sequence[Note], request: frozenset[str]) -> list[Note]:
        """The notes that apply to a request, in the order in which they began; the best if they are too many."""
        applying = [note for note in notes if not note.scope or stems(note.scope) & request]
        costs = {note.number: self._count_tokens(note.text) for note in applying}
        if sum(costs.values()) <= self.options.note_tokens:
            return applying
        likeness = WordLikeness([note.text for note in applying])
        best = sorted(
            applying,
            key=lambda note: (not note.pinned, not note.scope, -likeness(note.text, request), -note.number),
        )
        room = self.options.note_tokens
        chosen: set[int] = set()
        for note in best:
            if costs[note.number] <= room:
                room -= costs[note.number]
                chosen.add(note.number)
        return [note for note in applying if note.number in chosen]

    def _choose_examples(
        self, incoming: IncomingRequest, in_use: Sequence[Note], notes: Sequence[Note], request: frozenset[str]
    ) -> list[Note]:
        """The examples for a request, the best last: a model follows what stands nearest."""
        kept_examples = [note for note in in_use if note.question]
        if not kept_examples or not self.options.examples or incoming.chat.tools:
            return []
        links = self.ledger.read(examples.shown, incoming.owner)
        active = {note.number for note in notes if note.state is NoteState.ACTIVE}
        states = {note.number: note.state for note in in_use}
        candidates = [
            example
            for example in kept_examples
            if stems(example.question) != request
            and (example.pinned or still_wanted(links.get(example.number, set()), states))
        ]
        likeness = WordLikeness([example.question for example in candidates])

        def rank(example: Note) -> tuple[object, ...]:
            shown = len(links.get(example.number, set()) & active)
            origin = examples.BEST_ORIGINS.index(example.origin)
            return (not example.pinned, -shown, origin, -likeness(example.question, request), -example.number)

        return sorted(candidates, key=rank)[: self.options.examples][::-1]

    def _is_withheld(self, note: Note, conversations: int) -> bool:
        every = self.options.note_probes
        if not every:
            return False
        round_number, place = divmod(conversations, every)
        text = f"{self.seed} {note.number} {round_number}".encode()
        drawn = int.from_bytes(blake2b(text, digest_size=8).digest()) % every
        return round_number > 0 and place == drawn


class WordLikeness:
    """How much texts have in common with a request: shared words count more, the fewer of the texts have them.

    Plain word statistics, because they cost microseconds and need no model: an embedding by the served model would make
    each first request wait for a pass through it.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = len(texts)
        self._having = Counter(stem for text in texts for stem in stems(text))

    def __call__(self, text: str, request: frozenset[str]) -> float:
        return sum(math.log(1 + self._texts / self._having[stem]) for stem in stems(text) & request)


@lru_cache(4096)
def stems(text: str) -> frozenset[str]:
    """The words of a text, as far as they are compared."""
    return frozenset(word.lower()[:STEM_LETTERS] for word in _WORD.findall(text))


def still_wanted(shown: set[int], states: Mapping[int, NoteState]) -> bool:
    """Whether an example shows no note that was removed, and not only notes that the policy does without."""
    found = [states.get(number, NoteState.REMOVED) for number in shown]
    return NoteState.REMOVED not in found and (not found or NoteState.ACTIVE in found)


def last_words(messages: Sequence[Message]) -> str:
    """What the user said last."""
    said = [message for message in messages if message["role"] == "user"]
    return message_words(said[-1]) if said else ""


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
