"""The read model of a ledger: consistent snapshots, and a cursor that reports each change once."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openclaw_rl.ledger import changes, updates, verdicts
from openclaw_rl.ledger.change_log import Changes
from openclaw_rl.ledger.errors import LedgerUnusable, NoLedger
from openclaw_rl.ledger.offline import open_offline
from openclaw_rl.ledger.reader import LedgerReader, open_reader
from openclaw_rl.ledger.schema import FILE, connect
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
from support.records import Book, a_side_turn, a_turn, write_old_ledger

NEXT = [{"role": "user", "content": "thanks"}]


@pytest.fixture
def book(tmp_path: Path) -> Iterator[Book]:
    book = Book(tmp_path)
    yield book
    book.close()


@pytest.fixture
def reader(book: Book) -> Iterator[LedgerReader]:
    with open_reader(book.folder) as reader:
        yield reader


def judge(book: Book, verdict: Verdict, sample: SampleKind | None = SampleKind.RL, session: str = "s") -> int:
    turn = book.put(State.READY, session=session)
    assert book.change(verdicts.record, turn, verdict, sample, "nothing to train on", 0)
    return turn


# What can be read


def test_sessions_and_turns_are_read_as_nouns(book: Book, reader: LedgerReader) -> None:
    one = book.capture(a_turn("one", messages=[{"role": "user", "content": "first words"}]))
    two = book.capture(a_turn("two"))
    aside = book.capture(a_side_turn("one"))
    assert [(summary.key.id, summary.turns, summary.main) for summary in reader.sessions()] == [
        ("one", 2, 1),
        ("two", 1, 1),
    ]
    assert [turn.number for turn in reader.turns(SessionKey("me", "one"))] == [one, aside]
    assert reader.turn(two) == book.read(two)
    assert reader.turn_numbers() == [one, two, aside]
    assert reader.session_ids("t") == ["two"]
    (summary,) = reader.sessions(id="one")
    assert reader.first_messages(summary) == [{"role": "user", "content": "first words"}]
    assert [turn.number for turn in reader.conversation_starts(1)] == [one]
    assert reader.counts().states[State.AWAITING] == 2


def test_verdicts_are_counted_by_source_and_sign(book: Book, reader: LedgerReader) -> None:
    hint = (Hint("shorter"),)
    for verdict in (Verdict(1.0, Source.LLM), Verdict(-0.5, Source.LLM, hint), Verdict(0.0, Source.LLM), Verdict()):
        judge(book, verdict)
    assert [(verdict.sign, verdict.hints) for verdict in reader.verdicts()] == [
        (Sign.GOOD, 0),
        (Sign.BAD, 1),
        (Sign.NEUTRAL, 0),
        (Sign.ABSTAINED, 0),
    ]
    nothing = dict.fromkeys(Sign, 0)
    assert reader.verdict_counts() == [
        VerdictCounts(Source.LLM, nothing | {Sign.GOOD: 1, Sign.BAD: 1, Sign.NEUTRAL: 1}, 1),
        VerdictCounts(None, nothing | {Sign.ABSTAINED: 1}, 0),
    ]


def test_examples_are_found_once_under_the_first_kind_that_fits(book: Book, reader: LedgerReader) -> None:
    hinted = judge(book, Verdict(1.0, Source.FEEDBACK, (Hint("h"),)), SampleKind.OPD_RL)
    good = [judge(book, Verdict(score, Source.LLM)) for score in (0.5, 1.0, 0.75)]
    silent = judge(book, Verdict(), None)
    assert [(kind, turn.number) for kind, turn in reader.examples(2)] == [
        (ExampleKind.HINTED, hinted),
        (ExampleKind.BEST, good[1]),
        (ExampleKind.BEST, good[2]),
        (ExampleKind.ABSTAINED, silent),
    ]


def test_updates_are_read_with_what_became_of_them(book: Book, reader: LedgerReader) -> None:
    turns = [book.put(State.BATCHED) for _ in range(2)]
    book.change(updates.apply, 1, 7, turns[:1], {"loss": 0.5})
    book.change(updates.quarantine, 2, turns[1:], "the loss is not finite")
    applied, refused = reader.updates()
    assert (applied.step, applied.version, applied.outcome) == (1, 7, StepOutcome.APPLIED)
    assert (applied.turns, applied.metrics) == ((turns[0],), {"loss": 0.5})
    assert (refused.outcome, refused.version, refused.reason) == (
        StepOutcome.QUARANTINED,
        None,
        "the loss is not finite",
    )


def test_a_snapshot_is_one_moment_and_the_next_call_sees_what_came_since(book: Book, reader: LedgerReader) -> None:
    with reader.snapshot():
        book.capture(a_turn())
        assert reader.counts().total == 0
        assert reader.cursor() == 1
        with reader.snapshot():
            assert reader.sessions() == []
    assert reader.counts().total == 1


def test_turns_that_are_read_one_by_one_are_of_one_moment(book: Book, reader: LedgerReader) -> None:
    first = book.capture(a_turn())
    turns = reader.turns()
    assert next(turns).number == first
    book.capture(a_turn())
    assert list(turns) == []


def test_a_reader_cannot_write(book: Book, reader: LedgerReader) -> None:
    with pytest.raises(LedgerUnusable, match="readonly"), reader.snapshot() as db:
        db.execute("DELETE FROM turns")


def test_what_is_no_ledger_is_said_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(NoLedger, match=f"There is no ledger in {tmp_path}"), open_reader(tmp_path):
        pass
    (tmp_path / FILE).write_bytes(b"no database" * 100)
    damaged = f"The ledger in {tmp_path} is damaged: file is not a database"
    with pytest.raises(LedgerUnusable, match=damaged), open_reader(tmp_path):
        pass


# The cursor


def test_every_change_shows_up_once(book: Book, reader: LedgerReader) -> None:
    def news() -> Changes:
        nonlocal cursor
        told = reader.changes_since(cursor)
        assert told.complete
        cursor = told.cursor
        again = reader.changes_since(cursor)
        assert again == Changes(cursor, True), "what was told is not told again"
        return told

    cursor = reader.cursor()
    turn = book.capture(a_turn("s"))
    (summary,) = reader.sessions()
    session = summary.number
    told = news()
    assert (told.sessions, told.turns, told.verdicts, told.updates) == ((session,), (turn,), (), ())
    book.change(changes.set_next_state, turn, NEXT)
    assert news().turns == (turn,)
    book.change(changes.add_feedback, "me", book.read(turn).completion, 0, Feedback(1.0))
    assert news().turns == (turn,)
    book.change(verdicts.record, turn, Verdict(1.0, Source.LLM), SampleKind.RL, "", 1)
    told = news()
    assert (told.turns, told.verdicts) == ((turn,), (turn,))
    book.move(turn, State.BATCHED)
    book.change(updates.apply, 1, 1, [turn])
    told = news()
    assert (told.turns, told.verdicts, told.updates) == ((turn,), (), (1,))
    book.change(updates.follow, 0)
    assert news().updates == (1,)
    book.change(changes.close_session, SessionKey("me", "s"))
    assert news().sessions == (session,)
    with open_offline(book.folder) as ledger:
        ledger.forget(ledger.reader.sessions())
        ledger.wipe(beside_server=True)
    told = news()
    assert (told.sessions, told.turns) == ((session,), (turn,))
    assert reader.turn_numbers() == []


def test_a_change_that_fails_leaves_no_news(book: Book, reader: LedgerReader) -> None:
    turn = book.put(State.READY)
    cursor = reader.cursor()
    with pytest.raises(Exception, match="cannot become"):
        book.change(updates.apply, 1, 1, [turn])
    assert reader.changes_since(cursor) == Changes(cursor, True)


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


def test_news_are_complete_while_another_process_writes(book: Book, reader: LedgerReader) -> None:
    cursor, told, polls = reader.cursor(), list[int](), 0
    tests = Path(__file__).parents[1]
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(book.folder), str(tests)])
    try:
        ended = False
        while not ended:
            ended = writer.poll() is not None
            news = reader.changes_since(cursor)
            assert news.complete
            told += news.turns
            cursor, polls = news.cursor, polls + bool(news.turns)
    finally:
        writer.kill()
    assert writer.wait() == 0
    assert told == reader.turn_numbers()
    assert len(told) == 200
    assert polls > 1, "it was written meanwhile"


def test_the_cursor_goes_on_after_a_restart(tmp_path: Path) -> None:
    first = Book(tmp_path)
    with open_reader(tmp_path) as reader:
        cursor = reader.cursor()
    known = first.capture(a_turn())
    first.close()
    second = Book(tmp_path)
    new = second.capture(a_turn())
    with open_reader(tmp_path) as reader:
        assert reader.changes_since(cursor).turns == (known, new)
    second.close()


def test_a_cursor_that_is_too_old_is_told_to_read_all(book: Book, reader: LedgerReader) -> None:
    cursor = reader.cursor()
    book.capture(a_turn())
    many = (
        "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 52000) "
        "INSERT INTO changes (kind, item) SELECT 'turn', 1 FROM n"
    )
    book.change(lambda db: db.execute(many) and None)
    told = reader.changes_since(cursor)
    assert not told.complete
    assert told.cursor == reader.cursor()
    assert not told.turns
    assert book.scalar("SELECT count(*) FROM changes") <= 51_000
    turn = book.capture(a_turn())
    assert reader.changes_since(told.cursor).turns == (turn,)


@pytest.mark.parametrize("cursor", [0, 10_000])
def test_a_cursor_of_no_or_of_another_ledger_is_told_to_read_all(book: Book, reader: LedgerReader, cursor: int) -> None:
    book.capture(a_turn())
    assert reader.changes_since(cursor) == Changes(reader.cursor(), complete=False)


def test_a_ledger_from_before_the_log_is_to_be_read_whole(tmp_path: Path) -> None:
    write_old_ledger(tmp_path, "CREATE TABLE changes", turns=1)
    with pytest.raises(LedgerUnusable, match="an older version"), open_reader(tmp_path):
        pass
    with open_offline(tmp_path) as ledger:
        assert not ledger.reader.changes_since(0).complete
        assert ledger.reader.changes_since(ledger.reader.cursor()).complete
    assert connect(tmp_path / FILE).execute("SELECT count(*) FROM turns").fetchone()[0] == 1
