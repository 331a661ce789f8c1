"""The notes in a ledger, as the server reads and changes them."""

import sqlite3
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from openclaw_rl.ledger import notes
from openclaw_rl.types import ConversationNote, Note

T = TypeVar("T")


class Read(Protocol):
    def __call__(self, query: Callable[[sqlite3.Connection], T]) -> T: ...


class Write(Protocol):
    def __call__(self, change: Callable[[sqlite3.Connection], T]) -> Awaitable[T]: ...


class NoteKeeper:
    """The notes of all owners. Each change is one transaction; nobody can change another owner's notes."""

    def __init__(self, read: Read, write: Write) -> None:
        self._read, self._write = read, write

    def of_owner(self, owner: str) -> list[Note]:
        """The owner's notes that were not removed, in the order in which they began."""
        return self._read(lambda db: notes.of_owner(db, owner))

    def begin(self, owner: str) -> list[tuple[Note, int]]:
        """The owner's notes for a new conversation, each with the number of conversations that had it before."""
        return self._read(lambda db: notes.begin(db, owner))

    def of_conversation(self, turn: int) -> tuple[int | None, list[ConversationNote]]:
        """The turn with which the notes of a turn's conversation began, if it has any, and the notes."""
        return self._read(lambda db: notes.of_conversation(db, turn))

    def why_personal(self, turn: int, *, several: bool) -> str:
        """Why the notes of a turn must not be learned by all users; empty if they may, or if there is one user."""
        return self._read(lambda db: notes.why_personal(db, turn) if several or notes.several_owners(db) else "")

    async def add(self, owner: str, text: str, topic: str = "", *, pinned: bool = False) -> Note:
        """Raises TooManyNotes."""
        return await self._write(lambda db: notes.add(db, owner, text, topic, pinned=pinned))

    async def edit(
        self, owner: str, number: int, *, text: str | None = None, topic: str = "", pinned: bool | None = None
    ) -> Note:
        """Raises UnknownNote."""

        def change(db: sqlite3.Connection) -> Note:
            return notes.edit(db, notes.load(db, number, owner), text=text, topic=topic, pinned=pinned)

        return await self._write(change)

    async def remove(self, owner: str, number: int) -> None:
        """Raises UnknownNote."""
        await self._write(lambda db: notes.remove(db, notes.load(db, number, owner)))
