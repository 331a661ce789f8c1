"""Work on a run's ledger outside its server: forget, clean up, roll back, import. A server may run meanwhile."""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from openclaw_rl.ledger import deletion, episodes, notes, policies, schema, updates
from openclaw_rl.ledger.errors import NoLedger, sqlite_errors_as_sentences
from openclaw_rl.ledger.private import make_private
from openclaw_rl.ledger.reader import LedgerReader
from openclaw_rl.ledger.schema import FILE, connect, migrate, transaction
from openclaw_rl.ledger.trajectories import Imported, import_file
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import BASE_VERSION, Batch, Note, SessionSummary

#: How long to wait for a lock that another program holds.
LOCK_SECONDS = 10
#: Not the same command again: the beginning of a deleted session's id may be that of another one.
WIPE_LATER = "run 'openclaw-rl forget --wipe' again"
#: SQLite rewrites a file of this size in about a second, for which a server's requests can wait.
MAX_BYTES_REWRITTEN_BESIDE_SERVER = 256 << 20


class OfflineLedger:
    """A ledger that a command has open.

    - Each change is one transaction: it happens as a whole or not at all.
    - A server may use the same ledger meanwhile: a change waits `LOCK_SECONDS` for the server's lock.
    - An older ledger is brought up to date when it is opened.
    """

    def __init__(self, db: sqlite3.Connection, folder: Path) -> None:
        self._db, self._folder = db, folder
        self.reader = LedgerReader(db, folder)

    def forget(self, sessions: Sequence[SessionSummary], user: str | None = None) -> list[int]:
        """Delete sessions with everything in them, and all notes of a user; the numbers of the sessions' turns."""
        with transaction(self._db):
            if user is not None:
                notes.forget(self._db, user)
            return episodes.forget(self._db, [summary.number for summary in sessions])

    def unfinished_deletions(self) -> list[str]:
        """The ids of deleted sessions that may still be in files."""
        return deletion.unfinished(self._db)

    def add_note(self, owner: str, text: str, topic: str = "") -> Note:
        """Raises TooManyNotes."""
        with transaction(self._db):
            return notes.add(self._db, owner, text, topic)

    def edit_note(self, number: int, *, text: str | None = None, topic: str = "", pinned: bool | None = None) -> Note:
        """Raises UnknownNote."""
        with transaction(self._db):
            return notes.edit(self._db, notes.load(self._db, number), text=text, topic=topic, pinned=pinned)

    def remove_note(self, number: int) -> Note:
        """Raises UnknownNote."""
        with transaction(self._db):
            note = notes.load(self._db, number)
            notes.remove(self._db, note)
            return note

    def wipe(self, finished: Iterable[str] = (), *, beside_server: bool) -> str:
        """Remove what was deleted from the files too. If that cannot be done now: why, and what to do; else empty.

        SQLite overwrites the rows that it deletes, but not the copies that it left when it moved rows between pages.
        Then the deletion of the sessions `finished`, which are in no other file, is complete.
        """
        if beside_server and (self._folder / FILE).stat().st_size > MAX_BYTES_REWRITTEN_BESIDE_SERVER:
            return f"rewriting so large a ledger would keep the server from recording: {WIPE_LATER} when it is stopped"
        self._db.execute("VACUUM")
        with transaction(self._db):
            deletion.finish(self._db, finished)
        busy, _log, _checkpointed = self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return f"another program is reading an older state of them: {WIPE_LATER} later" if busy else ""

    def latest_version(self) -> int:
        """The highest policy version in the ledger."""
        return updates.latest_version(self._db)

    def lost(self, version: int) -> list[Batch]:
        return updates.lost(self._db, version)

    def infer_policies(self, steps: Mapping[int, int]) -> None:
        """Record policy versions that the ledger does not know, given the step of each."""
        with transaction(self._db):
            updates.infer_policies(self._db, steps)

    def follow(
        self, version: int, *, made_from: int | None = None, lost: Sequence[Batch] = (), retrain: bool = False
    ) -> None:
        """Let exactly the steps in a policy count. With `made_from`, it is a new version of that policy.

        The turns of other steps, also of the `lost` ones, wait to be trained on again only with `retrain`.
        """
        with transaction(self._db):
            if not retrain:
                updates.give_up(self._db, lost)
            if made_from is not None:
                policies.add(self._db, version, made_from)
            updates.follow(self._db, version, undo_after=BASE_VERSION if retrain else None)

    def import_file(self, path: Path, renderer: ChatRenderer) -> Imported:
        """Read a trajectories file into the ledger."""
        return import_file(self._db, path, renderer)


def check_ledger(folder: Path) -> None:
    """Raise NoLedger unless the folder has one."""
    if not (folder / FILE).is_file():
        raise NoLedger(
            f"There is no ledger in {folder.absolute()}: no server has recorded anything there. Start one with "
            "openclaw-rl serve, or give the --run-dir of another."
        )


def inspect_ledger(folder: Path) -> int | None:
    """How many turns the ledger in a folder has; None if there is no ledger. Changes nothing.

    Raises LedgerUnusable for a ledger that is damaged or cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    with sqlite_errors_as_sentences(folder), contextlib.closing(connect(path, readonly=True)) as db:
        (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        (turns,) = db.execute("SELECT count(*) FROM turns").fetchone()
    return int(turns)


@contextlib.contextmanager
def open_offline(folder: Path, *, create: bool = False) -> Iterator[OfflineLedger]:
    """The ledger in a folder, to read and change. Raises LedgerUnusable, also for what fails inside the block."""
    if not create:
        check_ledger(folder)
    with sqlite_errors_as_sentences(folder):
        schema.create(folder / FILE)
    with sqlite_errors_as_sentences(folder), contextlib.closing(connect(folder / FILE)) as db:
        db.execute(f"PRAGMA busy_timeout = {LOCK_SECONDS * 1000}")
        migrate(db)
        try:
            yield OfflineLedger(db, folder)
        finally:
            make_private(folder)
