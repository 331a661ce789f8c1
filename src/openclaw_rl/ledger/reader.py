"""The read model of a ledger: what status, sessions, the report and pages show of a run."""

import contextlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.ledger import (
    change_log,
    episodes,
    groups,
    learning_pages,
    notes,
    pages,
    policies,
    queries,
    updates,
    verdicts,
)
from openclaw_rl.ledger.change_log import Changes
from openclaw_rl.ledger.errors import LedgerUnusable, NewerLedger, NoLedger, sqlite_errors_as_sentences
from openclaw_rl.ledger.migrations import MIGRATIONS
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.status import Status, read_status
from openclaw_rl.ledger.unread import unread_words
from openclaw_rl.ledger.verdicts import ExampleKind
from openclaw_rl.types import (
    BASE_VERSION,
    Batch,
    Counts,
    EpisodeCounts,
    EpisodePoint,
    GroupCard,
    Note,
    PageChanges,
    PagePlace,
    SessionCard,
    SessionKey,
    SessionSummary,
    StoredTurn,
    TurnCard,
    Update,
    UpdateBatch,
    UpdateCard,
    VerdictCounts,
    VerdictSummary,
)

#: How long to wait for a lock; readers meet one only while a ledger is being recovered or moved.
LOCK_SECONDS = 10


class LedgerReader:
    """Reads a ledger for people and pages.

    - It changes nothing. It neither waits for a writer nor holds one up.
    - Each call sees the ledger at one moment. Inside `with reader.snapshot():` all calls see the same moment.
    - A caller that passes `changes_since` the cursor that it was last given learns of every committed change exactly
      once, from every process, also after restarts. If the log no longer reaches back so far, the answer says so.
    - A ledger that cannot be read raises LedgerUnusable with a sentence; an unknown turn raises UnknownTurn.
    """

    def __init__(self, db: sqlite3.Connection, folder: Path) -> None:
        self._db, self._folder = db, folder

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """One moment of the ledger for all reads in the block. SQLite's log cannot shrink while it is open."""
        with sqlite_errors_as_sentences(self._folder):
            nested = self._db.in_transaction
            if nested:
                yield self._db
                return
            self._db.execute("BEGIN")
            try:
                # SQLite takes the snapshot with the first read, not with BEGIN.
                self._db.execute("SELECT 1 FROM sqlite_schema").fetchone()
                yield self._db
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def status(self, server: str | None, ready: Mapping[str, Any], saved: int = BASE_VERSION) -> Status:
        """Where the run stands; `server`, `ready` and `saved` as for `read_status`."""
        with self.snapshot() as db:
            return read_status(db, server, ready, saved)

    def unread_words(self) -> str:
        """That the rules do not understand most of what somebody says, with examples; empty if they do."""
        with self.snapshot() as db:
            return unread_words(db)

    def counts(self) -> Counts:
        with self.snapshot() as db:
            return queries.counts(db)

    def sessions(self, id: str | None = None, owner: str | None = None) -> list[SessionSummary]:
        """Sessions, the latest active first; of one id or one owner if given."""
        with self.snapshot() as db:
            return queries.sessions(db, id, owner)

    def session_ids(self, prefix: str) -> list[str]:
        """The ids of sessions that start with `prefix`, of all owners."""
        with self.snapshot() as db:
            return queries.session_ids(db, prefix)

    def episodes(self, limit: int) -> list[SessionSummary]:
        """The sessions that are episodes, the latest active first, at most `limit`."""
        with self.snapshot() as db:
            return queries.sessions(db, episodes_only=True, limit=limit)

    def episode_counts(self) -> EpisodeCounts:
        with self.snapshot() as db:
            return episodes.counts(db)

    def first_messages(self, session: SessionSummary) -> list[dict[str, Any]]:
        """The messages of a session's first main turn, or of its first turn if it has no main turn."""
        with self.snapshot() as db:
            return queries.first_messages(db, session.number)

    def turn(self, number: int) -> StoredTurn:
        with self.snapshot() as db:
            return queries.load_turn(db, number)

    def turn_numbers(self, session: SessionKey | None = None) -> list[int]:
        """The turns of a session, or of all, in the order they were recorded."""
        with self.snapshot() as db:
            return queries.turn_numbers(db, session)

    def turns(self, session: SessionKey | None = None) -> Iterator[StoredTurn]:
        """The same turns with all that the ledger has of them, one at a time from one snapshot."""
        with self.snapshot() as db:
            for number in queries.turn_numbers(db, session):
                yield queries.load_turn(db, number)

    def conversation_starts(self, limit: int) -> Iterator[StoredTurn]:
        """The first main turns that continue no other turn, in the order they were recorded."""
        with self.snapshot() as db:
            for number in queries.conversation_starts(db, limit):
                yield queries.load_turn(db, number)

    def judged_turns(self) -> list[int]:
        """Turns that have a verdict and are no part of an episode, in the order they were recorded."""
        with self.snapshot() as db:
            return queries.judged_turns(db)

    def verdicts(self) -> list[VerdictSummary]:
        """All verdicts, in the order they were given."""
        with self.snapshot() as db:
            return verdicts.summaries(db)

    def verdict_counts(self) -> list[VerdictCounts]:
        """Verdicts by source and sign, the source with most verdicts first."""
        with self.snapshot() as db:
            return verdicts.counts(db)

    def examples(self, each: int) -> list[tuple[ExampleKind, StoredTurn]]:
        """At most `each` turns of each kind, the clearest or newest; a turn has the first kind that fits it."""
        with self.snapshot() as db:
            return [(kind, queries.load_turn(db, number)) for kind, number in verdicts.examples(db, each)]

    def updates(self) -> list[Update]:
        """All training steps with what became of them, in the order they were made."""
        with self.snapshot() as db:
            return updates.load(db)

    def trainable(self) -> int:
        """How many turns can be trained on."""
        with self.snapshot() as db:
            return groups.trainable(db)

    def notes(self, owner: str | None = None, *, all_states: bool = False) -> list[Note]:
        """The notes of one owner or of all, in the order in which they began; with `all_states` removed ones too."""
        with self.snapshot() as db:
            return notes.of_owner(db, owner, all_states=all_states)

    def steps_with(self, turns: Iterable[int]) -> list[int]:
        """The training steps that used these turns and made a policy, whether or not they count."""
        with self.snapshot() as db:
            return policies.steps_with(db, turns)

    def versions_with(self, turns: Iterable[int] | None = None) -> set[int]:
        """The policy versions that were trained on at least one of these turns, or of those that were deleted."""
        with self.snapshot() as db:
            return policies.trained_on(db, policies.turns_deleted(db) if turns is None else turns)

    def line(self, version: int) -> list[int]:
        """A policy version and those that it was made from, the newest first."""
        with self.snapshot() as db:
            return policies.line(db, version)

    def steps_after(self, version: int) -> list[Batch]:
        """The steps that led from a policy version to the newest one that was made from it, in their order."""
        with self.snapshot() as db:
            return updates.lost(db, version)

    def session_page(self, owner: str, after: PagePlace | None, limit: int, only: str = "") -> list[SessionCard]:
        """An owner's sessions, the latest active first, after a place; `only` is "", "chats" or "episodes"."""
        with self.snapshot() as db:
            return pages.session_page(db, owner, after, limit, only)

    def session_card(self, owner: str, number: int) -> SessionCard | None:
        """An owner's session; None if there is none with this number."""
        with self.snapshot() as db:
            return pages.find_session(db, owner, number)

    def session_named(self, owner: str, id: str) -> SessionCard | None:
        with self.snapshot() as db:
            return pages.named_session(db, owner, id)

    def turn_page(self, session: int, before: int | None, limit: int) -> list[TurnCard]:
        """The last turns of a session before a turn, in the order they were recorded."""
        with self.snapshot() as db:
            return pages.turn_page(db, session, before, limit)

    def turn_cards(self, owner: str, turns: Sequence[int]) -> list[TurnCard]:
        """Those of these turns that are the owner's."""
        with self.snapshot() as db:
            return pages.find_turns(db, owner, turns)

    def update_page(self, before: int | None, limit: int) -> list[UpdateCard]:
        """Training steps before one, the newest first."""
        with self.snapshot() as db:
            return learning_pages.update_page(db, before, limit)

    def update_card(self, number: int) -> UpdateCard | None:
        with self.snapshot() as db:
            return learning_pages.find_update(db, number)

    def update_batch(self, update: UpdateCard, owner: str) -> UpdateBatch:
        """The turns of a step, as far as the owner may see them."""
        with self.snapshot() as db:
            return learning_pages.update_batch(db, update, owner)

    def step_metrics(self, limit: int) -> list[Mapping[str, Any]]:
        """The metrics of the last steps that count, the oldest first."""
        with self.snapshot() as db:
            return learning_pages.step_metrics(db, limit)

    def group_page(self, owner: str, before: int | None, limit: int) -> list[GroupCard]:
        """An owner's groups before one, the newest first, with their attempts."""
        with self.snapshot() as db:
            return learning_pages.group_page(db, owner, before, limit)

    def episode_points(self, owner: str | None, limit: int) -> list[EpisodePoint]:
        """The rewards of an owner's last episodes, or of all, the oldest first."""
        with self.snapshot() as db:
            return learning_pages.episode_points(db, owner, limit)

    def cursor(self) -> int:
        """Where `changes_since` starts for a caller that has read everything in the same snapshot."""
        with self.snapshot() as db:
            return change_log.cursor(db)

    def changes_since(self, cursor: int) -> Changes:
        """What changed after a cursor, and the next cursor. Cursor 0 is before every ledger: it means "read all"."""
        with self.snapshot() as db:
            return change_log.changes_since(db, cursor)

    def changes_for(self, cursor: int, owner: str) -> PageChanges:
        """The same, as far as an owner may know."""
        with self.snapshot() as db:
            return pages.changes_for(db, cursor, owner)


@contextlib.contextmanager
def open_reader(folder: Path) -> Iterator[LedgerReader]:
    """The ledger in a folder, on a connection that can only read. Raises LedgerUnusable; updates no older ledger."""
    path = folder / FILE
    if not path.is_file():
        raise NoLedger(f"There is no ledger in {folder}: no server has recorded a turn there yet.")
    with sqlite_errors_as_sentences(folder), contextlib.closing(connect(path, readonly=True)) as db:
        db.execute(f"PRAGMA busy_timeout = {LOCK_SECONDS * 1000}")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise NewerLedger(f"The ledger in {folder} was written by a newer version of this program: update it.")
        if version < len(MIGRATIONS):
            raise LedgerUnusable(
                f"The ledger in {folder} was written by an older version of this program: "
                "`openclaw-rl status` brings it up to date."
            )
        yield LedgerReader(db, folder)
