"""Practice: a note is learned for good, from answers that the base model gives with the note and its examples."""

from dataclasses import dataclass
from enum import StrEnum


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
    is_anchor: bool = False
    """Whether the note is not for this prompt: the policy is to answer as the base model does."""
