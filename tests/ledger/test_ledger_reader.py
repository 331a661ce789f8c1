"""The read model of a ledger: consistent snapshots, and a cursor that reports each change once."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openclaw_rl.ledger import deletion, pages, sessions, training, turns, verdicts
from openclaw_rl.ledger.errors import LedgerUnusable, NoLedger
from openclaw_rl.ledger.pages import Changes
from openclaw_rl.ledger.schema import FILE, open_ledger, snapshot, transaction
from openclaw_rl.ledger.turns import add_feedback, set_next_state
from openclaw_rl.ledger.verdicts import ExampleKind
from openclaw_rl.types import (
    Feedback,
    Hint,
    SampleKind,
    SessionKey,
    Sign,
    Source,
    State,
    StepOutcome,
    Verdict,
    VerdictCounts,
)
from support.records import Book, a_side_turn, a_turn

NEXT = [{"role": "user", "content": "thanks"}]


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    book = Book(tmp_path)
    yield book
    book.close()


@pytest.fixture
def db(book: Book) -> Iterator[sqlite3.Connection]:
    with open_ledger(book.folder, readonly=True) as db:
        yield db


def judge(book: Book, verdict: Verdict, sample: SampleKind | None = SampleKind.RL, session: str = "s") -> int:
    turn = book.put(State.READY, session=session)
    assert book.change(verdicts.record, turn, verdict, sample, "nothing to train on", 0)
    return turn


# What can be read


def test_sessions_and_turns_are_read_as_nouns(book: Book, db: sqlite3.Connection) -> None:
    one = book.capture(a_turn("one", messages=[{"role": "user", "content": "first words"}]))
    two = book.capture(a_turn("two"))
    aside = book.capture(a_side_turn("one"))
    assert [(summary.key.id, summary.turns, summary.main) for summary in pages.session_summaries(db)] == [
        ("one", 2, 1),
        ("two", 1, 1),
    ]
    assert [turn.number for turn in turns.load_turns(db, SessionKey("me", "one"))] == [one, aside]
    assert turns.load_turn(db, two) == book.read(two)
    assert turns.turn_numbers(db) == [one, two, aside]
    assert sessions.session_ids(db, "t") == ["two"]
    (summary,) = pages.session_summaries(db, id="one")
    assert sessions.first_messages(db, summary.number) == [{"role": "user", "content": "first words"}]
    assert turns.conversation_starts(db, 1) == [one]
    assert turns.counts(db).states[State.AWAITING] == 2


def test_verdicts_are_counted_by_source_and_sign(book: Book, db: sqlite3.Connection) -> None:
    hint = (Hint("shorter"),)
    for verdict in (Verdict(1.0, Source.LLM), Verdict(-0.5, Source.LLM, hint), Verdict(0.0, Source.LLM), Verdict()):
        judge(book, verdict)
    assert [(verdict.sign, verdict.hints) for verdict in verdicts.summaries(db)] == [
        (Sign.GOOD, 0),
        (Sign.BAD, 1),
        (Sign.NEUTRAL, 0),
        (Sign.ABSTAINED, 0),
    ]
    nothing = dict.fromkeys(Sign, 0)
    assert verdicts.counts(db) == [
        VerdictCounts(Source.LLM, nothing | {Sign.GOOD: 1, Sign.BAD: 1, Sign.NEUTRAL: 1}, 1),
        VerdictCounts(None, nothing | {Sign.ABSTAINED: 1}, 0),
    ]


def test_examples_are_found_once_under_the_first_kind_that_fits(book: Book, db: sqlite3.Connection) -> None:
    hinted = judge(book, Verdict(1.0, Source.FEEDBACK, (Hint("h"),)), SampleKind.OPD_RL)
    good = [judge(book, Verdict(score, Source.LLM)) for score in (0.5, 1.0, 0.75)]
    silent = judge(book, Verdict(), None)
    assert verdicts.examples(db, 2) == [
        (ExampleKind.HINTED, hinted),
        (ExampleKind.BEST, good[1]),
        (ExampleKind.BEST, good[2]),
        (ExampleKind.ABSTAINED, silent),
    ]


def test_updates_are_read_with_what_became_of_them(book: Book, db: sqlite3.Connection) -> None:
    batch = [book.put(State.BATCHED) for _ in range(2)]
    book.change(training.apply_step, 1, 7, batch[:1], {"loss": 0.5})
    book.change(training.quarantine, 2, batch[1:], "the loss is not finite")
    applied, refused = training.load_steps(db)
    assert (applied.step, applied.version, applied.outcome) == (1, 7, StepOutcome.APPLIED)
    assert (applied.turns, applied.metrics) == ((batch[0],), {"loss": 0.5})
    assert (refused.outcome, refused.version, refused.reason) == (
        StepOutcome.QUARANTINED,
        None,
        "the loss is not finite",
    )


def test_a_snapshot_is_one_moment_and_the_next_call_sees_what_came_since(book: Book, db: sqlite3.Connection) -> None:
    with snapshot(db):
        book.capture(a_turn())
        assert turns.counts(db).total == 0
        assert pages.cursor(db) == 1
        with snapshot(db):
            assert pages.session_summaries(db) == []
    assert turns.counts(db).total == 1


def test_turns_that_are_read_one_by_one_are_of_one_moment(book: Book, db: sqlite3.Connection) -> None:
    first = book.capture(a_turn())
    loaded = turns.load_turns(db)
    assert next(loaded).number == first
    book.capture(a_turn())
    assert list(loaded) == []


def test_what_is_opened_to_be_read_cannot_be_written(book: Book) -> None:
    with pytest.raises(LedgerUnusable, match="readonly"), open_ledger(book.folder, readonly=True) as db, snapshot(db):
        db.execute("DELETE FROM turns")


def test_what_is_no_ledger_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NoLedger, match=f"There is no ledger in {tmp_path}"), open_ledger(tmp_path, readonly=True):
        pass
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    damaged = f"The ledger in {tmp_path} is damaged: file is not a database"
    with pytest.raises(LedgerUnusable, match=damaged), open_ledger(tmp_path, readonly=True):
        pass


# The cursor


def test_every_change_shows_up_once(book: Book, db: sqlite3.Connection) -> None:
    def news() -> Changes:
        nonlocal cursor
        told = pages.changes_since(db, cursor)
        assert told.complete
        cursor = told.cursor
        again = pages.changes_since(db, cursor)
        assert again == Changes(cursor, True), "what was told is not told again"
        return told

    cursor = pages.cursor(db)
    turn = book.capture(a_turn("s"))
    (summary,) = pages.session_summaries(db)
    session = summary.number
    told = news()
    assert (told.sessions, told.turns, told.verdicts, told.updates) == ((session,), (turn,), (), ())
    book.change(set_next_state, turn, NEXT)
    assert news().turns == (turn,)
    book.change(add_feedback, "me", book.read(turn).completion, 0, Feedback(1.0))
    assert news().turns == (turn,)
    book.change(verdicts.record, turn, Verdict(1.0, Source.LLM), SampleKind.RL, "", 1)
    told = news()
    assert (told.turns, told.verdicts) == ((turn,), (turn,))
    book.move(turn, State.BATCHED)
    book.change(training.apply_step, 1, 1, [turn])
    told = news()
    assert (told.turns, told.verdicts, told.updates) == ((turn,), (), (1,))
    book.change(training.follow, 0)
    assert news().updates == (1,)
    book.change(sessions.close_session, SessionKey("me", "s"))
    assert news().sessions == (session,)
    with open_ledger(book.folder) as other:
        with transaction(other):
            deletion.delete_sessions(other, [session])
        deletion.wipe(other, beside_server=True)
    told = news()
    assert (told.sessions, told.turns) == ((session,), (turn,))
    assert turns.turn_numbers(db) == []


def test_a_change_that_fails_leaves_no_news(book: Book, db: sqlite3.Connection) -> None:
    turn = book.put(State.READY)
    cursor = pages.cursor(db)
    with pytest.raises(Exception, match="cannot become"):
        book.change(training.apply_step, 1, 1, [turn])
    assert pages.changes_since(db, cursor) == Changes(cursor, True)


WRITER = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from support.records import Book, a_turn
book = Book(Path(sys.argv[1]))
for number in range(200):
    book.capture(a_turn(f"session-{number}"))
book.close()
"""


def test_news_are_complete_while_another_process_writes(book: Book, db: sqlite3.Connection) -> None:
    cursor, told, polls = pages.cursor(db), list[int](), 0
    tests = Path(__file__).parents[1]
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(book.folder), str(tests)])
    try:
        ended = False
        while not ended:
            ended = writer.poll() is not None
            news = pages.changes_since(db, cursor)
            assert news.complete
            told += news.turns
            cursor, polls = news.cursor, polls + bool(news.turns)
    finally:
        writer.kill()
    assert writer.wait() == 0
    assert told == turns.turn_numbers(db)
    assert len(told) == 200
    assert polls > 1, "it was written meanwhile"


def test_the_cursor_goes_on_after_a_restart(tmp_path: Path) -> None:
    first = Book(tmp_path)
    with open_ledger(tmp_path, readonly=True) as db:
        cursor = pages.cursor(db)
    known = first.capture(a_turn())
    first.close()
    second = Book(tmp_path)
    new = second.capture(a_turn())
    with open_ledger(tmp_path, readonly=True) as db:
        assert pages.changes_since(db, cursor).turns == (known, new)
    second.close()


def test_a_cursor_that_is_too_old_is_told_to_read_all(book: Book, db: sqlite3.Connection) -> None:
    cursor = pages.cursor(db)
    book.capture(a_turn())
    many = (
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 52000) "
        "INSERT INTO changes (kind, item) SELECT 'turn', 1 FROM n"
    )
    book.change(lambda db: db.execute(many) and None)
    told = pages.changes_since(db, cursor)
    assert not told.complete
    assert told.cursor == pages.cursor(db)
    assert not told.turns
    assert book.scalar("SELECT count(*) FROM changes") <= 51_000
    turn = book.capture(a_turn())
    assert pages.changes_since(db, told.cursor).turns == (turn,)


@pytest.mark.parametrize("cursor", [0, 10_000])
def test_a_cursor_of_no_or_of_another_ledger_is_told_to_read_all(
    book: Book, db: sqlite3.Connection, cursor: int
) -> None:
    book.capture(a_turn())
    assert pages.changes_since(db, cursor) == Changes(pages.cursor(db), complete=False)
