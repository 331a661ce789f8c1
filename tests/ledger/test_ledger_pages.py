"""Pages of a ledger: in order, without gaps, an owner's own, and by index."""

import sqlite3

import pytest

from openclaw_rl.ledger import deletion, pages, training, turns
from openclaw_rl.types import Hint, PagePlace, SampleKind, Sign, Source, State, StepOutcome, Verdict
from support.judged_run import judged
from support.records import Book, a_turn


@pytest.fixture
def db(book: Book) -> sqlite3.Connection:
    return book.db


def test_every_session_is_on_exactly_one_page_also_those_of_one_moment(book: Book, db: sqlite3.Connection) -> None:
    for number in range(7):
        book.capture(a_turn(f"s{number}"))
        book.capture(a_turn(f"s{number}", owner="another"))
    book.change(lambda db: db.execute("UPDATE sessions SET last = 5.0"))
    listed, place = [], None
    while cards := pages.session_page(db, "me", place, 3):
        listed += [card.key.id for card in cards]
        place = PagePlace(cards[-1].last, cards[-1].number)
    assert listed == [f"s{number}" for number in reversed(range(7))]


def test_a_card_says_what_was_asked_and_how_it_was_judged(book: Book, db: sqlite3.Connection) -> None:
    verdicts = (Verdict(1.0, Source.LLM), Verdict(-1.0, Source.LLM, (Hint("Shorter."),)), Verdict(0.0, Source.LLM))
    for place, verdict in enumerate(verdicts):
        turn = book.put(State.READY, version=place, messages=[{"role": "user", "content": f"question {place}"}])
        judged(book, turn, verdict, SampleKind.RL)
    book.put(State.AWAITING, version=9)
    (card,) = pages.session_page(db, "me", None, 10)
    assert (card.turns, card.question, card.version) == (4, "question 0", 9)
    assert card.signs == (Sign.GOOD, Sign.BAD, Sign.NEUTRAL, None)


@pytest.mark.parametrize(
    ("content", "question"),
    [
        ("x" * 5000, "x" * pages.MAX_QUESTION_CHARACTERS),
        ([{"type": "text", "text": "in parts"}], "in parts"),
        ([{"type": "image_url", "image_url": {"url": "data:,"}}], ""),
        (None, ""),
        ([], ""),
        ("\ud83e?", "\ufffd?"),
    ],
)
def test_any_first_message_has_a_beginning(book: Book, db: sqlite3.Connection, content: object, question: str) -> None:
    book.capture(a_turn(messages=[{"role": "user", "content": content}]))
    (card,) = pages.session_page(db, "me", None, 1)
    assert card.question == question


def test_a_turn_shows_what_was_new_in_its_request(book: Book, db: sqlite3.Connection) -> None:
    system, first = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "one"}
    said, result = {"role": "assistant", "content": "yes"}, {"role": "tool", "content": "42"}
    tools = {"role": "tools", "tools": []}
    book.capture(a_turn(messages=[tools, system, first]))
    book.capture(a_turn(messages=[tools, system, first, said, result, {"role": "user", "content": "two"}]))
    cards = pages.turn_page(db, 1, None, 10)
    assert [[message["content"] for message in card.asked] for card in cards] == [["Be kind.", "one"], ["42", "two"]]


def test_turns_before_one_are_the_last_before_it(book: Book, db: sqlite3.Connection) -> None:
    numbers = [book.capture(a_turn()) for _ in range(6)]
    assert [card.number for card in pages.turn_page(db, 1, numbers[4], 2)] == numbers[2:4]
    assert [card.number for card in pages.turn_page(db, 1, None, 2)] == numbers[4:]


def test_a_batch_shows_an_owners_own_turns_and_counts_the_others(book: Book, db: sqlite3.Connection) -> None:
    own, other = book.put(State.BATCHED), book.put(State.BATCHED, owner="another", session="o")
    book.change(training.apply_step, 1, 1, [own, other], {"loss": 0.5})
    (update,) = pages.update_page(db, None, 5)
    assert (update.turns, update.outcome, update.metrics) == (2, StepOutcome.APPLIED, {"loss": 0.5})
    batch = pages.update_batch(db, update, "me")
    assert ([card.number for card in batch.cards], batch.others, batch.deleted, batch.parent) == ([own], 1, 0, 0)
    assert [dict(step) for step in pages.step_metrics(db, 5)] == [{"loss": 0.5, "step": 1, "version": 1}]


def test_changes_are_those_of_an_owner(book: Book, db: sqlite3.Connection) -> None:
    cursor = pages.cursor(db)
    own = book.capture(a_turn())
    book.capture(a_turn("o", owner="another"))
    found = pages.changes_for(db, cursor, "me")
    assert (found.sessions, found.turns, found.deleted, bool(found)) == ((1,), (own,), False, True)
    assert not pages.changes_for(db, found.cursor, "me")
    book.change(turns.set_next_state, own, [{"role": "user", "content": "next"}])
    assert pages.changes_for(db, found.cursor, "me").sessions == (1,), "also when only a turn changed"
    assert not pages.changes_for(db, found.cursor, "a third")


async def test_what_was_deleted_is_only_said_to_be_deleted(book: Book, db: sqlite3.Connection) -> None:
    book.capture(a_turn("o", owner="another"))
    cursor = pages.cursor(db)
    await book.ledger.write(deletion.delete_sessions, [1])
    found = pages.changes_for(db, cursor, "me")
    assert (found.sessions, found.turns, found.deleted) == ((), (), True)


def test_too_many_changes_mean_read_everything(
    book: Book, db: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    cursor = pages.cursor(db)
    monkeypatch.setattr(pages, "MAX_LISTED_CHANGES", 3)
    for _ in range(4):
        book.capture(a_turn())
    assert pages.changes_for(db, cursor, "me").complete is False


@pytest.mark.parametrize(
    ("query", "values"),
    [
        ("SELECT * FROM sessions s WHERE s.owner = ? ORDER BY s.last DESC, s.number DESC LIMIT 5", ("me",)),
        (
            "SELECT * FROM sessions s WHERE s.owner = ? AND (s.last, s.number) < (?, ?) "
            "ORDER BY s.last DESC, s.number DESC",
            ("me", 1.0, 1),
        ),
        ("SELECT number FROM turns WHERE session = ? AND number < 9 ORDER BY number DESC LIMIT 5", (1,)),
        ("SELECT * FROM groups WHERE owner = ? AND number < 9 ORDER BY number DESC LIMIT 5", ("me",)),
        ("SELECT state, count(*) FROM turns GROUP BY state", ()),
    ],
)
def test_pages_are_read_by_index_and_never_sorted(book: Book, query: str, values: tuple[object, ...]) -> None:
    plan = " ".join(row["detail"] for row in book.db.execute(f"EXPLAIN QUERY PLAN {query}", values))
    assert "INDEX" in plan
    assert "TEMP B-TREE" not in plan
