"""Wishes about how to answer, the notes that are kept of them, and the practice of notes.

By practice a note is learned for good, from answers that the base model gives with the note and its examples.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

#: In an instruction that forbids something, in the languages in which wishes are read.
_DENIAL = re.compile(
    r"\b(?:not|never|don't|stop|avoid|no|without|nicht|nie|keine?|ohne|pas|jamais|sans|nunca|sin)\b|不|别"
)
_QUOTED = re.compile(r'["\u201c\u201e]([^"\u201c\u201d\u201e]+)["\u201c\u201d]')
#: Where an English instruction puts the words that it quotes.
_PLACES = {
    "beginning": re.compile(r"\b(?:begin|start|open|first|front)"),
    "end": re.compile(r"\b(?:end|close|finish|conclude|sign off|last)"),
}
#: Separates the general part of a topic from the special one: "format/lists".
TOPIC_SEPARATOR = "/"
#: Letters of a word of a scope that are compared, so that "recipe" and "recipes" are one word.
SCOPE_LETTERS = 5


def scope_stems(scope: str) -> frozenset[str]:
    """The words of a scope, as far as they are compared."""
    return frozenset(word[:SCOPE_LETTERS] for word in re.findall(r"\w+", scope.casefold()))


def placed_words(instruction: str) -> frozenset[tuple[str, str]]:
    """The words that an instruction quotes, with where it puts them, if it names one place alone."""
    said = instruction.casefold()
    unquoted = _QUOTED.sub("", said)
    places = [name for name, words in _PLACES.items() if words.search(unquoted)]
    quoted = {words.strip(" .,:;!?") for words in _QUOTED.findall(said)}
    return frozenset((words, places[0]) for words in quoted) if len(places) == 1 else frozenset()


@dataclass(frozen=True, slots=True)
class Wish:
    """What somebody wants of answers."""

    instruction: str
    """One plain sentence to the assistant in the user's language: "Talk like a pirate."."""
    topic: str
    """What it is about: "length", "language", "address", "units", "tone", "format/lists", or content words."""
    lasting: bool
    """False for a wish about one answer only: "in French this time"."""
    stronger: str = ""
    """The instruction for somebody who wishes the same again, if it is another one."""
    said: float = 0.0
    """When it was said."""
    scope: str = ""
    """Which requests it is for, in words that they have ("recipe cooking"); empty: all."""
    undoes: frozenset[str] = frozenset()
    """The words that tell which earlier wish it takes back: "sam" for "Stop calling me Sam."."""
    instead_of: frozenset[int] = frozenset()
    """Numbers of notes that it takes the place of, or takes back if it has no instruction."""

    def replaces(self, older: "Wish") -> bool:
        """Whether it makes an older wish of the same user void.

        Wishes of one topic do, if they are for the same requests. So do a general and a special one: "format" and
        "format/lists", but not "format/lists" and "format/bold". So do two that put the same quoted words at the same
        place, in whatever words.
        """
        mine, others = scope_stems(self.scope), scope_stems(older.scope)
        if mine != others and not mine & others:
            return False
        one = self.topic.split(TOPIC_SEPARATOR)
        other = older.topic.split(TOPIC_SEPARATOR)
        shared = min(len(one), len(other))
        same_words = placed_words(self.instruction) & placed_words(older.instruction)
        return one[:shared] == other[:shared] or self.repeats(older) or bool(same_words)

    def takes_back(self, older: str) -> bool:
        """Whether it takes an older instruction back: it has the same words, and denies nothing itself."""
        said = older.casefold()
        return (
            bool(self.undoes)
            and _DENIAL.search(said) is None
            and all(re.search(rf"(?<![a-z]){re.escape(word)}(?![a-z])", said) for word in self.undoes)
        )

    def repeats(self, older: "Wish") -> bool:
        """Whether an older wish says all that it says, in the same words or in stronger ones."""
        return older.instruction in (self.instruction, self.stronger)


@dataclass(frozen=True, slots=True)
class HeardWishes:
    """What a turn tells about notes: the lasting wishes in reply to it, and how its answer keeps to notes."""

    replied: tuple[Wish, ...] = ()
    """One that is a note already is a complaint that the note did not hold."""
    wanted: str = ""
    """The answer that the user wanted instead, in their own words; empty if they did not write it."""
    kept: Mapping[int, bool] = field(default_factory=dict)
    """Whether the answer keeps to the conversation's notes, by their numbers; without those that cannot be checked."""
    asked: tuple[Wish, ...] = ()
    """Those in the request that began the conversation, if a judge read them."""


class NoteState(StrEnum):
    """Whether a note is in use."""

    ACTIVE = "active"
    """It is given to the model."""
    RETIRED = "retired"
    """The policy does without it; it comes back if its owner complains."""
    REMOVED = "removed"
    """Its owner removed it, or a later wish replaced it."""


class NoteOrigin(StrEnum):
    """Where a note comes from. The last three are those of examples, the best first."""

    SAID = "said"
    """Its owner wished it in a conversation."""
    WRITTEN = "written"
    """Its owner wrote it down, as a note or as an example."""
    CORRECTED = "corrected"
    """Its owner wrote the answer that they wanted."""
    IMPROVED = "accepted after a complaint"
    ACCEPTED = "accepted under notes"

    @classmethod
    def _missing_(cls, value: object) -> "NoteOrigin":
        """What is stored of a damaged row counts as the least."""
        return cls.ACCEPTED


@dataclass(frozen=True, slots=True)
class NoteOutcomes:
    """How the first answers of conversations were received."""

    held: int = 0
    """Accepted, and the answer shows that it keeps to the note."""
    complained: int = 0
    """The owner asked for the same again, or the answer shows that it does not keep to the note."""

    @property
    def total(self) -> int:
        return self.held + self.complained


@dataclass(frozen=True, slots=True)
class Note:
    """What one user asked for, as an instruction that the model is given, or as an example.

    An example is a question of that user with an answer as wanted. The model is given it as an earlier exchange.
    """

    number: int
    owner: str
    """The name of the API key, as for sessions."""
    text: str
    """The instruction; of an example, the answer as wanted."""
    topic: str
    """As in a `Wish`; empty for an example."""
    turn: int | None
    """The turn after which the user said it; None if the owner wrote the note."""
    created: float
    said: float
    """When its owner said or wrote it last."""
    state: NoteState
    reason: str
    """Why it is retired or removed."""
    changed: float
    """When it got its state or its text."""
    pinned: bool
    """A pinned note is always given: it is never withheld, retired or replaced by what the user says."""
    given: NoteOutcomes = NoteOutcomes()
    """Outcomes of answers that were given with the note."""
    withheld: NoteOutcomes = NoteOutcomes()
    """Outcomes of answers that were given without it."""
    origin: NoteOrigin = NoteOrigin.SAID
    question: str = ""
    """What was asked, if it is an example."""
    scope: str = ""
    """Which requests it is for, in words that they have ("recipe cooking"); empty: all."""


@dataclass(frozen=True, slots=True)
class ConversationNote:
    """A note as it stood when a conversation began. The conversation keeps it so."""

    number: int
    text: str
    given: bool
    """False if it was withheld: as a test of the policy, or because it is retired."""
    question: str = ""
    """What was asked, if it is an example."""


class PracticeState(StrEnum):
    """How far the practice of a note is."""

    WAITING = "waiting"
    """It has not begun: it waits for others, or until nobody needs the machine."""
    RUNNING = "running"
    LEARNED = "learned"
    """The policy keeps to the note without it."""
    DONE = "done"
    """All steps were made; `reason` says how far the policy keeps to the note."""
    STOPPED = "stopped"
    """It ended early; `reason` says why."""


#: States that practice does not leave any more.
ENDED_PRACTICE = (PracticeState.LEARNED, PracticeState.DONE, PracticeState.STOPPED)


@dataclass(frozen=True, slots=True)
class Practice:
    """The practice of one note."""

    number: int
    owner: str
    note: int
    state: PracticeState
    reason: str
    by_hand: bool
    """Whether somebody asked for it. Otherwise the server began it by itself."""
    steps: int
    """How many training steps it takes."""
    made: int
    """How many of them count so far."""
    created: float
    ended: float | None

    @property
    def is_under_way(self) -> bool:
        return self.state not in ENDED_PRACTICE

    @property
    def words(self) -> str:
        """How far it is, or how it went."""
        if self.state is PracticeState.WAITING:
            return "waits to be practised, until nobody needs the machine"
        if self.state is PracticeState.RUNNING:
            return f"is being practised: step {self.made} of {self.steps}"
        if self.state is PracticeState.STOPPED:
            return f"practice stopped: {self.reason}"
        learned = "learned for good" if self.state is PracticeState.LEARNED else "practised"
        return f"{learned} in {self.made} steps: {self.reason}"


@dataclass(frozen=True, slots=True)
class PracticePrompt:
    """A first message to practise with."""

    text: str
    turn: int | None = None
    """The turn with which its owner asked it; None if it comes with the program."""


@dataclass(frozen=True, slots=True)
class PracticedAnswer:
    """An answer that is practised, token for token."""

    prompt: PracticePrompt
    text: str
    prompt_ids: tuple[int, ...]
    """The prompt without notes and examples: what the policy is to answer so."""
    response_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the policy that is trained, after the prompt without notes and examples."""
    version: int
    """Of that policy."""
    teacher_logprobs: tuple[float, ...] = ()
    """Of the base model with notes and examples, if the answer is the policy's own."""
    taught_logprob: float = 0.0
    """The mean log-prob of a token when the base model gave the answer, with notes and examples."""
    ended: bool = True
    """Whether it ended by itself, or was cut off."""
    is_anchor: bool = False
    """Whether the note is not for this prompt: the policy is to answer as the base model does."""
    score: float | None = None
    """Whether the policy's own answer keeps to the note and makes sense (1) or not (-1); None if it is imitated."""
