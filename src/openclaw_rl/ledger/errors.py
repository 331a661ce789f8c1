"""What can go wrong with a ledger. Errors of SQLite become one of these before they leave the ledger."""

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from openclaw_rl.errors import UserError


class LedgerError(Exception):
    """A change that cannot be made; the message says why."""


class CaptureSuspended(LedgerError):
    """The ledger cannot be written or read at the moment; the message says why."""


class UnknownTurn(LedgerError):
    """There is no such turn."""


class DamagedTurn(LedgerError):
    """What is recorded of a turn cannot be read. Only this turn is concerned."""

    def __init__(self, turn: int, what: str) -> None:
        super().__init__(f"turn {turn} is damaged: {what}")
        self.turn = turn
        self.reason = f"damaged: {what}"
        """Why the turn is dropped."""


class CannotJudge(LedgerError):
    """Feedback comes too late for this turn, or the turn is never trained on."""


class CannotDelete(LedgerError):
    """An answer cannot be deleted by itself."""


class UnknownSession(LedgerError):
    """The owner has no such session."""


class AlreadyRewarded(LedgerError):
    """The episode has ended with another result."""


class TooLate(LedgerError):
    """The episode or its group no longer takes a reward, or its turns were trained on."""


class UnknownLease(LedgerError):
    """There is no such lease."""


class LeaseRefused(LedgerError):
    """The lease has ended without being confirmed."""


class BadResult(LedgerError):
    """A field of an episode's result does not fit what is recorded."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.field = field


class UnknownNote(LedgerError):
    """The owner has no such note."""


class TooManyNotes(LedgerError):
    """The owner has as many notes as a prompt may have."""


class CannotPractise(LedgerError):
    """The note cannot be practised; the message says why."""


class LedgerUnusable(UserError):
    """The ledger's file cannot be used; the message says why and what to do."""


class NoLedger(LedgerUnusable):
    """There is no ledger in the folder."""


class NewerLedger(LedgerUnusable):
    """The ledger was written by a newer version of the program."""


@contextlib.contextmanager
def sqlite_errors_as_sentences(folder: Path) -> Iterator[None]:
    """Raise LedgerUnusable where SQLite fails with the ledger in this folder."""
    try:
        yield
    except sqlite3.OperationalError as error:
        raise LedgerUnusable(
            f"The ledger in {folder} cannot be used at the moment: {error}. Another program may hold it, or its disk "
            "may be full or read-only."
        ) from None
    except sqlite3.DatabaseError as error:
        raise LedgerUnusable(
            f"The ledger in {folder} is damaged: {error}. Restore its file from a copy, or move it away to start a "
            "new one."
        ) from None
