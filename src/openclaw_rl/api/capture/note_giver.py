"""Which notes and examples a conversation has, and how they are written into its prompts."""

import logging
import math
import re
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from heapq import nsmallest
from itertools import chain

from openclaw_rl.api.reader import IncomingRequest
from openclaw_rl.api.wire import TextRequest
from openclaw_rl.ledger import notes as kept
from openclaw_rl.ledger.examples import WRITTEN_BY_OWNER
from openclaw_rl.ledger.examples import shown as shown_notes
from openclaw_rl.ledger.options import NotesOptions
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.rendering.chat import ChatError, Message, Renderer
from openclaw_rl.rendering.clients import message_words
from openclaw_rl.rendering.context import applies, with_examples, with_notes
from openclaw_rl.types import ConversationNote, Note, NoteState, TurnKind, scope_stems

log = logging.getLogger(__name__)

#: The header with which a client wants one request answered without notes, and its values.
NOTES_HEADER = "x-notes"
NOTES_OFF = ("off", "0", "false", "no")

#: A request with examples in its prompt takes at most this share of the context, so that there is room to go on.
MAX_SHARE_WITH_EXAMPLES = 0.5
#: Owners whose notes are kept in memory, the last ones.
MAX_KNOWN_OWNERS = 256
#: Letters of a word that are compared, so that "recipe" and "recipes" are one word.
STEM_LETTERS = 5
#: Characters of a request that notes and examples are compared with.
MAX_COMPARED_CHARACTERS = 4000
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
    - At most `examples` examples are given: first what their owner wrote, then those that show the most notes, then the
      likest. None is given with tools, or if the prompt would take more than half of the context.
    - A conversation that the model's template does not accept with notes, or that does not fit the context with them,
      is answered without them.
    """

    def __init__(self, ledger: Ledger, renderer: Renderer, options: NotesOptions, seed: int) -> None:
        self.ledger = ledger
        self.renderer = renderer
        self.options = options
        self.seed = seed
        self._known: OrderedDict[str, KnownNotes] = OrderedDict()

    def begin(self, incoming: IncomingRequest, *, probes: bool = True) -> RequestNotes:
        """The notes of a conversation that begins. Without `probes`, nothing is withheld that is in use."""
        known = self._known_notes(incoming.owner)
        if not known.states:
            return RequestNotes()
        words = last_words(incoming.chat.messages)[:MAX_COMPARED_CHARACTERS]
        request = stems(words)
        notes = known.choose_notes(words, request, self.options.note_tokens)
        examples = [] if incoming.chat.tools else known.choose_examples(request, notes, self.options.examples)
        chosen = [*notes, *examples]
        counts = self.ledger.read(kept.conversations, [note.number for note in chosen])
        withheld = {
            note.number
            for note in chosen
            if probes and not note.pinned and self._is_withheld(note, counts.get(note.number, 0))
        }

        def is_given(note: Note) -> bool:
            return is_given_at_all(note) and note.number not in withheld and not known.shown(note) & withheld

        return RequestNotes(
            [ConversationNote(note.number, note.text, is_given(note), note.question) for note in chosen]
        )

    def _known_notes(self, owner: str) -> "KnownNotes":
        """An owner's notes, read again only if they have changed."""
        stamp = self.ledger.read(kept.stamp, owner)
        known = self._known.get(owner)
        if known is None or known.stamp != stamp:
            in_use = self.ledger.read(kept.for_new_conversation, owner)
            known = KnownNotes(stamp, in_use, self.ledger.read(shown_notes, owner), self.renderer.count)
        self._known[owner] = known
        self._known.move_to_end(owner)
        if len(self._known) > MAX_KNOWN_OWNERS:
            self._known.popitem(last=False)
        return known

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
            prompt = self.renderer.render(chat)
        except ChatError as error:
            log.warning("A conversation is answered without its notes: %s", error)
            return None
        return replace(incoming, chat=chat, prompt=prompt) if prompt.length < incoming.max_context_tokens else None

    def write_fitting(
        self, incoming: IncomingRequest, notes: RequestNotes
    ) -> tuple[IncomingRequest | None, RequestNotes]:
        """The request as `write` gives it, and its notes: without examples if they would fill the context."""
        noted = self.write(incoming, notes)
        if any(note.question for note in notes.given):
            room = MAX_SHARE_WITH_EXAMPLES * incoming.max_context_tokens
            if noted is None or noted.prompt.length > room:
                notes = notes.without_examples()
                noted = self.write(incoming, notes)
        return noted, notes

    def messages(self, messages: Sequence[Message], notes: RequestNotes) -> list[Message]:
        """A conversation with what the model is given: notes as instructions, examples as earlier exchanges."""
        texts = [note.text for note in notes.given if not note.question]
        exchanges = [(note.question, note.text) for note in notes.given if note.question]
        return with_examples(with_notes(messages, texts, self.renderer.default_system), exchanges)

    def _is_withheld(self, note: Note, conversations: int) -> bool:
        every = self.options.note_probes
        if not every:
            return False
        round_number, place = divmod(conversations, every)
        text = f"{self.seed} {note.number} {round_number}".encode()
        drawn = int.from_bytes(blake2b(text, digest_size=8).digest()) % every
        return round_number > 0 and place == drawn


class KnownNotes:
    """The notes and examples of one owner, as they stood at a `stamp`, ready to be chosen from."""

    def __init__(
        self,
        stamp: kept.Stamp,
        in_use: Sequence[Note],
        links: Mapping[int, set[int]],
        count_tokens: Callable[[str], int],
    ) -> None:
        """`links`: the notes that each example shows."""
        self.stamp = stamp
        self.states = {note.number: note.state for note in in_use}
        self._links = links
        self._notes = [note for note in in_use if not note.question]
        self._tokens = [count_tokens(note.text) for note in self._notes]
        self._fewest_tokens = min(self._tokens, default=0)
        self._newest = range(len(self._notes) - 1, -1, -1)
        self._pinned = [place for place in self._newest if self._notes[place].pinned]
        self._scoped = [place for place in self._newest if self._notes[place].scope]
        self._scopes = {place: scope_stems(self._notes[place].scope) for place in self._scoped}
        self._note_likeness = WordLikeness([note.text for note in self._notes])
        # The others are not given. They are recorded as withheld, so that a complaint brings them back.
        self._retired = [place for place in self._newest if not is_given_at_all(self._notes[place])]
        self._examples = [note for note in in_use if note.question and (note.pinned or self._is_wanted(note))]
        self._asked = [stems(example.question) for example in self._examples]
        self._example_likeness = WordLikeness([example.question for example in self._examples])

    def shown(self, example: Note) -> set[int]:
        """The notes that an example shows; none for a note."""
        return self._links.get(example.number, set())

    def choose_notes(self, words: str, request: frozenset[str], room: int) -> list[Note]:
        """The notes that apply to a request, in the order in which they began; the best if they are too many.

        `words` are those of the request, and `request` their stems. The notes have at most `room` tokens. Pinned ones
        come first, then those with a scope, then the likest, then the newest; retired ones have the room that is left.
        """
        said = words.casefold()
        said_stems = scope_stems(said) if self._scopes else frozenset()
        scores = self._note_likeness.scores(request)
        best = sorted(scores, key=lambda place: -scores[place])
        ranks = (self._pinned, self._scoped, best, self._newest)
        retired = set(self._retired)
        given = (place for place in chain.from_iterable(ranks) if place not in retired)
        others = {place for place, scope in self._scopes.items() if not applies(scope, said, said_stems)}
        chosen: set[int] = set()
        for place in chain(given, self._retired):
            cost = self._tokens[place]
            if room < self._fewest_tokens:
                break
            if place not in chosen and cost <= room and place not in others:
                room -= cost
                chosen.add(place)
        return [self._notes[place] for place in sorted(chosen)]

    def choose_examples(self, request: frozenset[str], notes: Sequence[Note], most: int) -> list[Note]:
        """The examples for a request that has these notes, the best last: a model follows what stands nearest."""
        active = {note.number for note in notes if note.state is NoteState.ACTIVE}
        scores = self._example_likeness.scores(request)

        def rank(place: int) -> tuple[bool, bool, int, float, int]:
            example = self._examples[place]
            # What its owner wrote is better than what they once accepted of a model.
            is_own = example.origin in WRITTEN_BY_OWNER
            shown = len(self.shown(example) & active)
            return (not example.pinned, not is_own, -shown, -scores.get(place, 0.0), -place)

        others = (place for place, asked in enumerate(self._asked) if asked != request)
        return [self._examples[place] for place in nsmallest(most, others, key=rank)][::-1]

    def _is_wanted(self, example: Note) -> bool:
        """Whether an example is active, shows no note that was removed, and not only notes that are retired."""
        if example.state is not NoteState.ACTIVE:
            return False
        found = [self.states.get(number, NoteState.REMOVED) for number in self.shown(example)]
        return NoteState.REMOVED not in found and (not found or NoteState.ACTIVE in found)


def is_given_at_all(note: Note) -> bool:
    """Whether a note is given where it is not withheld; False if it is retired."""
    return note.pinned or note.state is NoteState.ACTIVE


class WordLikeness:
    """How much texts have in common with a request: shared words count more, the fewer of the texts have them.

    Plain word statistics, because they cost microseconds and need no model: an embedding by the served model would make
    each first request wait for a pass through it.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        having: dict[str, list[int]] = defaultdict(list)
        for place, text in enumerate(texts):
            for stem in stems(text):
                having[stem].append(place)
        self._places = having
        self._weights = {stem: math.log(1 + len(texts) / len(places)) for stem, places in having.items()}

    def scores(self, request: frozenset[str]) -> dict[int, float]:
        """The likeness of the texts that share a word with a request, by their place."""
        scores: dict[int, float] = defaultdict(float)
        for stem in request & self._weights.keys():
            for place in self._places[stem]:
                scores[place] += self._weights[stem]
        return scores


def stems(text: str) -> frozenset[str]:
    """The words of a text, as far as they are compared."""
    return frozenset(word.lower()[:STEM_LETTERS] for word in _WORD.findall(text))


def last_words(messages: Sequence[Message]) -> str:
    """What the user said last."""
    said = [message for message in messages if message["role"] == "user"]
    return message_words(said[-1]) if said else ""


def takes_notes(incoming: IncomingRequest, kind: TurnKind) -> bool:
    """Whether a request is one of a chat with a person, which its notes are meant for, and lets itself have them."""
    is_chat = kind is TurnKind.MAIN and not isinstance(incoming.request, TextRequest) and incoming.episode is None
    return is_chat and (incoming.headers.get(NOTES_HEADER) or "").strip().lower() not in NOTES_OFF
