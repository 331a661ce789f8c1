"""Bytes that a disk has changed: only the turn that they belong to is lost, and the ledger says which."""

import contextlib
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from openclaw_rl.ledger import (
    deletion,
    episodes,
    groups,
    leases,
    notes,
    pages,
    sessions,
    status,
    training,
    trajectories,
    turns,
    verdicts,
)
from openclaw_rl.ledger.errors import DamagedTurn, LedgerError
from openclaw_rl.ledger.schema import FILE, connect, create_tables, transaction
from openclaw_rl.ledger.store import FAULTS_OF_A_CHANGE, Ledger
from openclaw_rl.types import (
    ConversationNote,
    EpisodeMode,
    EpisodeResult,
    Feedback,
    HeardWishes,
    Hint,
    Question,
    SampleKind,
    SessionKey,
    Source,
    State,
    StoredTurn,
    TopTokens,
    Verdict,
    Vote,
    Wish,
)
from support.records import Book, a_turn

NEXT = [{"role": "user", "content": "Shorter, please."}]
TOP = TopTokens(np.array([[4, 6], [5, 7]]), np.array([[-0.5, -2.0], [-0.25, -3.0]], np.float32))
TABLE = np.array([[-0.5, -2.0], [-0.25, -3.0]], np.float32)
VERDICT = Verdict(
    -1.0,
    Source.LLM,
    (Hint("Be brief.", [-0.5, -0.25], "", TOP, TABLE, TABLE),),
    (Vote(Question.SCORE, -1.0, text="it is too long"),),
    "a complaint",
    0.5,
)
WISHES = HeardWishes(replied=(Wish("Be brief.", "length", lasting=True),))


def fill(folder: Path) -> dict[str, list[int]]:
    """A ledger in which three sessions each have a row in every table that is about turns; the turns of each."""
    book = Book(folder)
    written: dict[str, list[int]] = {}
    for owner in ("one", "two", "three"):
        written[owner] = conversation(book, owner)
    book.change(training.quarantine, 1, [written["one"][3]], "the loss is not finite")
    book.change(training.claim, 50, 0, 9)
    for step, owner in enumerate(written, start=1):
        book.change(training.apply_step, step, step, written[owner][:1], {"loss": 0.5})
    book.change(training.release_batches)
    book.change(leases.claim, 1, 9, 1000.0)
    book.close()
    return written


def conversation(book: Book, owner: str) -> list[int]:
    """A judged conversation, an attempt of a group, and a turn that is ready to be judged."""
    given = {"owner": owner, "session": f"chat of {owner}"}
    note = ConversationNote(
        book.change(notes.add, owner, "Answer in English.").number, "Answer in English.", given=True
    )
    first = book.capture(
        a_turn(**given, top=TOP, forced=[True, False], notes=[note], plain_ids=[1, 3], details={"cached_tokens": 1})
    )
    history = [*book.read(first).messages, book.read(first).message, *NEXT]
    second = book.capture(
        a_turn(**given, messages=history, parent=first, prompt_ids=[1, 2, 3, 4, 5, 8], notes_from=first),
        base=first,
        keep=5,
    )
    attempt = book.capture(a_turn(owner=owner, session=f"attempt of {owner}"))
    refused = book.put(State.BATCHED, **given)
    ready = book.capture(a_turn(owner=owner, session=f"open of {owner}"))
    for turn in (first, second):
        book.change(turns.set_next_state, turn, NEXT)
        completion = book.read(turn).completion
        book.change(turns.add_feedback, owner, completion, 0, Feedback(-1.0, "too long", Source.EXPLICIT))
        assert book.change(verdicts.record, turn, VERDICT, SampleKind.OPD_RL, "", 1, None, WISHES)
    book.change(episodes.begin, SessionKey(owner, f"attempt of {owner}"), "test", EpisodeMode.TRAIN)
    result = EpisodeResult(1.0, None, "a task", f"group of {owner}", 2, True)
    book.change(episodes.end, SessionKey(owner, f"attempt of {owner}"), result, 2)
    assert book.change(verdicts.record, attempt, Verdict(1.0, Source.ENVIRONMENT), SampleKind.RL, "", 1)
    book.change(turns.set_next_state, ready, NEXT)
    return [first, second, attempt, refused, ready]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[int]]]:
    folder = tmp_path_factory.mktemp("original")
    return folder, fill(folder)


def columns() -> list[tuple[str, str]]:
    with contextlib.closing(sqlite3.connect(":memory:")) as db:
        create_tables(db)
        tables = [name for (name,) in db.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")]
        return [
            (table, column[1])
            for table in tables
            if not table.startswith("sqlite_")
            for column in db.execute(f"PRAGMA table_info({table})")
        ]


#: What a disk can make of a value.
DAMAGES: dict[str, Callable[[Any], Any]] = {
    "a flipped bit": lambda value: flipped(value, 0x80),
    "another letter": lambda value: flipped(value, 0x01),
    "cut short": lambda value: value[: len(value) // 2] if isinstance(value, bytes) else value,
    "another value": lambda value: b"x" if isinstance(value, bytes) else -1,
}


def flipped(value: Any, bits: int) -> Any:
    """The value with changed bits: in the middle of bytes, high in a number."""
    if not isinstance(value, bytes):
        return int(value) ^ (bits << 20)
    if not value:
        return b"\xff"
    middle = len(value) // 2
    return value[:middle] + bytes([value[middle] ^ bits]) + value[middle + 1 :]


def damaged_copies(original: Path, table: str, column: str) -> Iterator[tuple[str, Path]]:
    """Copies of a ledger in which this column of one row is damaged: the first row, the one of the session `one`."""
    for name, damage in DAMAGES.items():
        folder = original.parent / f"{table} {column} {name}"
        folder.mkdir()
        shutil.copy(original / FILE, folder)
        with contextlib.closing(sqlite3.connect(folder / FILE, isolation_level=None)) as db:
            row = db.execute(
                f"SELECT rowid, typeof({column}), CASE WHEN typeof({column}) IN ('text', 'blob') "
                f"THEN CAST({column} AS BLOB) ELSE {column} END FROM {table} WHERE {column} IS NOT NULL"
            ).fetchone()
            if row is None:
                return
            new = damage(row[2])
            kind = "TEXT" if row[1] == "text" else "BLOB"
            value = f"CAST(? AS {kind})" if isinstance(new, bytes) else "?"
            with contextlib.suppress(sqlite3.IntegrityError):
                db.execute(f"UPDATE {table} SET {column} = {value} WHERE rowid = ?", (new, row[0]))
        yield name, folder
        shutil.rmtree(folder)


def read_lists(db: sqlite3.Connection) -> None:
    """Everything that pages, commands and loops read about many turns at once: none of it may fail."""
    status.read_status(db, None, {}).as_json()
    verdicts.summaries(db)
    verdicts.counts(db)
    verdicts.any_unsettled(db)
    for _kind, number in verdicts.examples(db, 5):
        turns.load_readable(db, number)
    for summary in pages.session_summaries(db):
        pages.named_session(db, *summary.key)
        pages.turn_page(db, summary.number, None, 50)
        with contextlib.suppress(DamagedTurn):
            sessions.first_messages(db, summary.number)
    for owner in ("one", "two", "three"):
        pages.session_page(db, owner, None, 50)
        pages.group_page(db, owner, None, 50)
        pages.changes_for(db, 1, owner)
        notes.for_new_conversation(db, owner)
    for update in pages.update_page(db, None, 50):
        pages.update_batch(db, update, "one")
    pages.step_metrics(db, 50)
    pages.episode_points(db, None, 50)
    episodes.counts(db)
    notes.of_owner(db, all_states=True)
    training.load_steps(db)
    training.steps_after(db, 0)
    training.versions_with_deleted_turns(db)
    leases.open_leases(db)
    leases.last_end(db)
    groups.queue(db)
    groups.trainable(db)
    groups.waiting(db)
    turns.ready_turns(db, (), 50)
    turns.open_conversations(db, 50)
    list(trajectories.export_trajectories(db, []))


def read_turns(db: sqlite3.Connection) -> tuple[list[StoredTurn], list[DamagedTurn]]:
    loaded = list(turns.load_turns(db))
    return (
        [turn for turn in loaded if isinstance(turn, StoredTurn)],
        [turn for turn in loaded if isinstance(turn, DamagedTurn)],
    )


def change_everything(db: sqlite3.Connection, damaged: list[DamagedTurn]) -> None:
    """What a server changes by itself: a change may be refused, but none may be taken for a fault of the database."""
    changes: list[tuple[Any, ...]] = [
        *((sessions.drop_damaged, error) for error in damaged),
        (verdicts.settle_sessions, True),
        (episodes.settle_groups, time.time() + 1, lambda _episode: ""),
        (episodes.close_idle, -1.0),
        (leases.expire,),
        (training.release_batches,),
        (training.claim, 1, 3, 9),
        (training.release_batches,),
        (leases.claim, 1, 9, 10.0),
        (training.follow, 1),
    ]
    db.execute("PRAGMA synchronous = OFF")
    for change, *arguments in changes:
        with contextlib.suppress(LedgerError, *FAULTS_OF_A_CHANGE), transaction(db):
            change(db, *arguments)


@pytest.mark.parametrize(
    ("table", "column"),
    [
        pytest.param(*pair, marks=() if pair in (("messages", "body"), ("verdicts", "votes")) else pytest.mark.more)
        for pair in columns()
    ],
)
def test_a_damaged_value_is_lost_alone(original: tuple[Path, dict[str, list[int]]], table: str, column: str) -> None:
    folder, written = original
    with contextlib.closing(connect(folder / FILE, readonly=True)) as db:
        whole = {turn.number: turn.message for turn in read_turns(db)[0]}
    mine = set(written["one"])
    for name, copy in damaged_copies(folder, table, column):
        with contextlib.closing(connect(copy / FILE, readonly=True)) as db:
            read_lists(db)
            readable, damaged = read_turns(db)
        assert {error.turn for error in damaged} <= mine | {-1}, name
        others = {turn.number: turn.message for turn in readable if turn.session.owner in ("two", "three")}
        assert others == {number: said for number, said in whole.items() if number not in mine}, name
        with contextlib.closing(connect(copy / FILE)) as db:
            change_everything(db, damaged)


def test_a_flipped_bit_in_a_message_is_found_whatever_it_makes_of_it(tmp_path: Path) -> None:
    for bits in (0x01, 0x02, 0x20, 0x80):
        folder = tmp_path / str(bits)
        book = Book(folder)
        turn = book.capture(a_turn(messages=[{"role": "user", "content": "a question of its own"}]))
        other = book.capture(a_turn("another"))
        book.close()
        content = bytearray((folder / FILE).read_bytes())
        place = content.index(b"a question of its own")
        content[place + 3] ^= bits
        (folder / FILE).write_bytes(content)
        ledger = Ledger(folder)
        with pytest.raises(DamagedTurn, match=f"turn {turn} is damaged: what is stored of it cannot be read"):
            ledger.read(turns.load_turn, turn)
        assert ledger.read(turns.load_turn, other).state is State.AWAITING
        ledger.submit(turns.set_next_state, turn, NEXT).result()
        with pytest.raises(DamagedTurn) as caught:
            ledger.read(turns.load_turn, turn)
        ledger.submit(sessions.drop_damaged, caught.value).result()
        (reason,) = ledger.read(turns.counts).dropped
        assert reason.startswith("damaged: ")
        ledger.submit(deletion.delete_answer, "me", ledger.read(turns.load_turn, other).completion).result()
        ledger.close()


def test_a_damaged_state_is_a_sentence_for_whoever_rates_or_deletes(book: Book) -> None:
    said = {"role": "user", "content": "Shorter, please."}
    before = book.capture(a_turn(completion="first"))
    book.change(turns.set_next_state, before, [said])
    book.capture(a_turn(completion="second", messages=[said]))
    book.change(lambda db: db.execute("UPDATE turns SET state = 'reaey' WHERE number = ?", (before,)))
    with pytest.raises(DamagedTurn, match=f"turn {before} is damaged"):
        book.change(turns.add_feedback, "me", "first", 0, Feedback(1.0))
    book.change(deletion.delete_answer, "me", "second")
    assert book.rows("SELECT next_state FROM turns") == [(None,)]


def test_policies_that_a_damaged_number_made_each_others_parents_stop_no_claim(book: Book) -> None:
    turn = book.put(State.READY, version=5)
    book.change(verdicts.record, turn, Verdict(1.0, Source.LLM), SampleKind.RL, "", 0)
    book.change(training.add_policy, 5, 6)
    book.change(training.add_policy, 6, 5)
    assert book.change(training.claim, 1, 0, 9) == [turn]
