"""Practices in a ledger, without a model."""

from sqlite3 import Connection

from openclaw_rl.api.service import Operations
from openclaw_rl.ledger import practices
from openclaw_rl.types import PracticedAnswer, PracticePrompt


class CanPractise(Operations):
    """A server that practises notes."""

    def why_no_practice(self) -> str:
        return ""


def an_answer(asked: int | None = None, text: str = "Chef, four.") -> PracticedAnswer:
    """An answer of two tokens to a message of a turn, or to one that comes with the program."""
    prompt = PracticePrompt("How many legs has a hen?", asked)
    return PracticedAnswer(prompt, text, (1, 2, 3), (4, 5), (-0.5, -0.25), 0)


def begin(db: Connection, note: int, *asked: int | None, steps: int = 24) -> list[int]:
    """Begin the practice of a note; the turns of its first answers, one to each message."""
    found = practices.start(db, practices.request(db, note).number, steps, personal=True, several=False)
    return practices.add_answers(db, found, [an_answer(turn) for turn in asked])
