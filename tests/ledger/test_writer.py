"""One thread writes: in order, many changes to a commit, and by itself again once the database can be had."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.ledger import store as module
from openclaw_rl.ledger.errors import CaptureSuspended, LedgerError
from openclaw_rl.ledger.schema import connect
from openclaw_rl.ledger.store import Ledger, Writer
from support.records import a_turn

#: Longer than anything here takes.
PATIENCE = 10


class Notes:
    """A database with one table, a writer, and a look from outside."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection = connect(path)
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("CREATE TABLE notes (text TEXT PRIMARY KEY)")
        self.statements: list[str] = []
        self.connection.set_trace_callback(self.statements.append)
        # What takes seconds takes a moment.
        self.writer = Writer(self.connection, lock_seconds=0.05)
        self.writer.retry_seconds = 0.0

    def note(self, text: str) -> "Future[str]":
        return self.writer.submit(note(text))

    def written(self) -> list[str]:
        with connect(self.path, readonly=True) as db:
            return [row[0] for row in db.execute("SELECT text FROM notes ORDER BY rowid")]

    @property
    def commits(self) -> int:
        return self.statements.count("COMMIT")


def note(text: str) -> Callable[[sqlite3.Connection], str]:
    def change(db: sqlite3.Connection) -> str:
        db.execute("INSERT INTO notes VALUES (?)", (text,))
        return text

    return change


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Notes]:
    notes = Notes(tmp_path / "notes.sqlite")
    yield notes
    notes.writer.close()


class Held:
    """A change that holds up the writer until it is let go."""

    def __init__(self, writer: Writer) -> None:
        self.begun, self._go = threading.Event(), threading.Event()
        self.done = writer.submit(self._wait)
        assert self.begun.wait(PATIENCE)

    def _wait(self, _db: sqlite3.Connection) -> None:
        self.begun.set()
        assert self._go.wait(PATIENCE)

    def let_go(self) -> None:
        self._go.set()
        self.done.result(PATIENCE)


def test_changes_are_made_in_the_order_they_were_submitted(notes: Notes) -> None:
    names = [f"{number:03}" for number in range(100)]
    done = [notes.note(name) for name in names]
    assert [one.result(PATIENCE) for one in done] == names
    assert notes.written() == names


def test_a_result_is_given_only_when_the_change_is_durable(notes: Notes) -> None:
    seen: list[list[str]] = []
    done = notes.note("a")
    done.add_done_callback(lambda _: seen.append(notes.written()))
    done.result(PATIENCE)
    notes.note("b").result(PATIENCE)
    assert seen == [["a"]]


def test_changes_that_wait_for_a_slow_one_share_a_commit(notes: Notes) -> None:
    slow = Held(notes.writer)
    done = [notes.note(str(number)) for number in range(200)]
    before = notes.commits
    slow.let_go()
    for one in done:
        one.result(PATIENCE)
    assert len(notes.written()) == 200
    assert notes.commits - before == 2


def test_one_commit_does_not_grow_beyond_a_limit(notes: Notes) -> None:
    notes.writer.max_group = 10
    slow = Held(notes.writer)
    done = [notes.note(str(number)) for number in range(25)]
    before = notes.commits
    slow.let_go()
    for one in done:
        one.result(PATIENCE)
    assert notes.commits - before == 4


def test_a_change_that_nobody_waits_for_shares_the_commit_of_the_next(notes: Notes) -> None:
    before = notes.commits
    alone = notes.writer.submit(note("alone"), is_awaited=False)
    assert notes.note("next").result(PATIENCE) == "next"
    assert alone.done()
    assert notes.commits - before == 1
    assert notes.writer.submit(note("last"), is_awaited=False).result(PATIENCE) == "last"
    assert notes.written() == ["alone", "next", "last"]


def test_the_log_is_copied_into_the_database_while_changes_are_made(
    notes: Notes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ROWS_IN_LOG", 10)
    log = notes.path.with_name(f"{notes.path.name}-wal")
    size = 50_000
    for number in range(200):
        notes.note(f"{number:03}" + "x" * size).result(PATIENCE)
    assert len(notes.written()) == 200
    # Each change takes twice its size: once in the table, once in the index.
    assert log.stat().st_size < 100 * size < notes.path.stat().st_size


class Odd(Exception):
    """Something that nobody foresaw."""


@pytest.mark.parametrize(
    "problem",
    [
        LedgerError("no"),
        sqlite3.IntegrityError("no"),
        KeyError("no"),
        # An integer too large for SQLite is this one.
        OverflowError("no"),
        IndexError("no"),
        AttributeError("no"),
        RecursionError("no"),
        Odd("no"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_a_change_that_fails_does_not_harm_the_others_of_its_commit(notes: Notes, problem: Exception) -> None:
    def half_way(db: sqlite3.Connection) -> None:
        note("half")(db)
        raise problem

    slow = Held(notes.writer)
    before, bad, after = notes.note("before"), notes.writer.submit(half_way), notes.note("after")
    slow.let_go()
    with pytest.raises(type(problem), match="no"):
        bad.result(PATIENCE)
    assert (before.result(PATIENCE), after.result(PATIENCE)) == ("before", "after")
    assert notes.note("later").result(PATIENCE) == "later"
    assert notes.written() == ["before", "after", "later"]
    assert notes.writer.suspended is None
    assert notes.writer.lost == 0


def test_a_real_conflict_is_told_to_the_one_who_made_it(notes: Notes) -> None:
    slow = Held(notes.writer)
    first, again, other = notes.note("a"), notes.note("a"), notes.note("b")
    slow.let_go()
    with pytest.raises(sqlite3.IntegrityError):
        again.result(PATIENCE)
    assert (first.result(PATIENCE), other.result(PATIENCE)) == ("a", "b")
    assert notes.written() == ["a", "b"]


async def test_a_request_that_is_cancelled_while_its_turn_is_written_does_not_stop_the_writer(
    tmp_path: Path,
) -> None:
    """A client that leaves at the last moment."""
    ledger = Ledger(tmp_path)
    slow = Held(ledger.writer)
    leaving = asyncio.create_task(ledger.capture([a_turn(completion="left")], "test", None, 0))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    staying = asyncio.create_task(ledger.capture([a_turn(completion="stayed")], "test", None, 0))
    await asyncio.sleep(0)
    slow.let_go()
    await asyncio.wait_for(staying, PATIENCE)
    await asyncio.wait_for(ledger.capture([a_turn(completion="next")], "test", None, 0), PATIENCE)
    ledger.close()
    with connect(tmp_path / "ledger.sqlite", readonly=True) as db:
        written = {row[0] for row in db.execute("SELECT completion FROM turns")}
    assert written == {"left", "stayed", "next"}


def suspends(notes: Notes, break_it: Callable[[], Any], mend_it: Callable[[], Any], reason: str) -> None:
    """A database that cannot be written for an hour."""
    notes.note("before").result(PATIENCE)
    break_it()
    slow_to_fail = [notes.note("lost 1"), notes.note("lost 2")]
    for one in slow_to_fail:
        with pytest.raises(CaptureSuspended, match=reason):
            one.result(PATIENCE)
    assert reason in str(notes.writer.suspended)
    lost = notes.writer.lost
    assert lost == 2
    # From now on nothing is tried until it is time to.
    tried = len(notes.statements)
    with pytest.raises(CaptureSuspended, match=reason):
        notes.note("lost 3").result(PATIENCE)
    assert len(notes.statements) == tried
    assert notes.writer.lost == lost + 1

    mend_it()
    notes.writer._retry_at = time.monotonic()  # the hour is over
    assert notes.note("after").result(PATIENCE) == "after"
    assert notes.writer.suspended is None
    assert notes.note("and on").result(PATIENCE) == "and on"
    assert notes.written() == ["before", "after", "and on"]


def test_a_locked_database_suspends_writing_until_it_is_released(notes: Notes) -> None:
    notes.writer.retry_seconds = 3600.0
    other = connect(notes.path)
    suspends(notes, lambda: other.execute("BEGIN EXCLUSIVE"), lambda: other.execute("COMMIT"), "locked")
    other.close()


def test_a_full_disk_suspends_writing_until_there_is_room(notes: Notes) -> None:
    notes.writer.retry_seconds = 3600.0
    large = notes.note

    def fill(text: str) -> "Future[str]":
        # Those that are to be lost do not fit; the others would.
        return large(text if not text.startswith("lost") else text + "x" * 100_000)

    notes.note = fill  # type: ignore[method-assign]

    def limit(pages: int) -> None:
        notes.connection.execute(f"PRAGMA max_page_count = {pages}")

    suspends(notes, lambda: limit(10), lambda: limit(10_000), "full")


def test_a_lock_that_is_released_in_time_costs_nothing(notes: Notes) -> None:
    notes.connection.execute("PRAGMA busy_timeout = 10000")
    other = connect(notes.path)
    other.execute("BEGIN EXCLUSIVE")
    done = notes.note("a")
    other.execute("COMMIT")
    other.close()
    assert done.result(PATIENCE) == "a"
    assert (notes.writer.suspended, notes.writer.lost) == (None, 0)


def test_a_suspended_writer_tries_again_after_a_while(notes: Notes) -> None:
    """By itself: with time alone."""
    other = connect(notes.path)
    other.execute("BEGIN EXCLUSIVE")
    for number in range(2):
        with pytest.raises(CaptureSuspended):
            notes.note(f"lost {number}").result(PATIENCE)
    other.execute("COMMIT")
    other.close()
    assert notes.note("a").result(PATIENCE) == "a"
    assert notes.writer.suspended is None


def test_suspending_and_resuming_are_said_in_the_log_once(notes: Notes, caplog: pytest.LogCaptureFixture) -> None:
    other = connect(notes.path)
    other.execute("BEGIN EXCLUSIVE")
    for number in range(3):
        with pytest.raises(CaptureSuspended):
            notes.note(f"lost {number}").result(PATIENCE)
    other.execute("COMMIT")
    other.close()
    for text in ("a", "b"):
        notes.note(text).result(PATIENCE)
    said = [record.getMessage() for record in caplog.records if record.name == module.__name__]
    assert len(said) == 2
    assert "locked" in said[0]
    assert "3 changes were lost" in said[1]


def test_closing_writes_what_was_submitted(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes.sqlite")
    slow = Held(notes.writer)
    done = [notes.note(str(number)) for number in range(300)]
    closing = threading.Thread(target=notes.writer.close)
    closing.start()
    slow.let_go()
    closing.join(PATIENCE)
    assert not closing.is_alive()
    assert [one.result(0) for one in done] == [str(number) for number in range(300)]
    assert len(notes.written()) == 300


def test_what_is_submitted_after_closing_is_refused_rather_than_kept_waiting(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "notes.sqlite")
    notes.writer.close()
    with pytest.raises(CaptureSuspended):
        notes.note("late").result(1)
