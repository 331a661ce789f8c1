"""`openclaw-rl forget` deletes what it is asked to, and says what remains."""

import contextlib

import pytest

from openclaw_rl.ledger import offline, queries
from openclaw_rl.ledger.lock import RunDirLock
from openclaw_rl.ledger.schema import FILE, connect
from support.commands import Program
from support.records import Book, a_turn


def test_forgetting_a_session(book: Book, program: Program) -> None:
    for name in ("one", "one", "two"):
        book.capture(a_turn(name))
    code, out, _err = program("forget", "--session", "one")
    assert code == 0
    assert "Forgot 1 session with 2 turns." in out
    assert "Training steps that had used them: none." in out
    assert [summary.key.id for summary in queries.sessions(book.db)] == ["two"]


def test_forgetting_a_user(book: Book, program: Program) -> None:
    for name, owner in (("one", "me"), ("two", "me"), ("one", "you")):
        book.capture(a_turn(name, owner))
    code, out, _err = program("forget", "--user", "me")
    assert code == 0
    assert "Forgot 2 sessions with 2 turns." in out
    assert [summary.key for summary in queries.sessions(book.db)] == [("you", "one")]


@pytest.mark.parametrize("whose", [("--session", "x"), ("--user", "x")])
def test_forgetting_what_is_not_there_is_said_and_changes_nothing(
    book: Book, program: Program, whose: tuple[str, str]
) -> None:
    book.capture(a_turn("one"))
    code, _out, err = program("forget", *whose)
    assert code == 2
    assert "nothing of that session or user" in err
    assert len(queries.sessions(book.db)) == 1


@pytest.mark.parametrize("whose", [(), ("--session", "one", "--user", "me")])
def test_forgetting_needs_either_a_session_or_a_user(book: Book, program: Program, whose: tuple[str, ...]) -> None:
    book.capture(a_turn("one"))
    code, _out, err = program("forget", *whose)
    assert code == 2
    assert "--session" in err
    assert "--user" in err
    assert len(queries.sessions(book.db)) == 1


def test_a_ledger_that_another_program_holds_is_said_in_a_sentence(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "LOCK_SECONDS", 0)
    book.capture(a_turn("one"))
    other = connect(book.folder / FILE)
    other.execute("BEGIN EXCLUSIVE")
    code, _out, err = program("forget", "--session", "one")
    assert code == 2
    assert "locked" in err
    # Looking is not held up.
    assert program("status")[0] == program("sessions")[0] == 0
    other.execute("ROLLBACK")
    other.close()
    assert program("forget", "--session", "one")[0] == 0


def test_a_large_ledger_is_not_written_anew_beside_a_server(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not record anything meanwhile."""
    monkeypatch.setattr(offline, "MAX_BYTES_REWRITTEN_BESIDE_SERVER", 0)
    for session in ("one", "two"):
        book.capture(a_turn(session))
    with contextlib.closing(RunDirLock(book.folder)):
        code, _out, err = program("forget", "--session", "one")
        assert code == 1
        assert "again when it is stopped" in err
    assert program("forget", "--session", "two")[0] == 0
    assert queries.sessions(book.db) == []


def test_what_could_not_be_wiped_yet_is_said(book: Book, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody still reads an older state of the ledger, so its log cannot be emptied."""
    monkeypatch.setattr(offline, "LOCK_SECONDS", 0)
    book.capture(a_turn("one", messages=[{"role": "user", "content": "a-very-private-matter"}]))
    reader = connect(book.folder / FILE)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM turns").fetchall()
    code, _out, err = program("forget", "--session", "one")
    left = b"a-very-private-matter" in book.raw_bytes()
    reader.execute("ROLLBACK")
    reader.close()
    assert left == (code != 0)
    assert left == ("again" in err)
