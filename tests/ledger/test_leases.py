"""Leases: the turns of an outside trainer, from claim to confirmation, whatever dies in between."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.ledger import deletion, leases, training, verdicts
from openclaw_rl.ledger.errors import LeaseRefused, UnknownLease
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import add_feedback
from openclaw_rl.types import Feedback, Lease, LeaseEnd, SampleKind, Source, State, Verdict
from support.episodes import attempt, judge
from support.methods import a_method
from support.records import Book

HOUR = 3600.0


@pytest.fixture
def book(tmp_path: Path) -> Any:
    book = Book(tmp_path)
    yield book
    book.close()


def judged(book: Book, count: int = 1, **given: Any) -> list[int]:
    numbers = []
    for _ in range(count):
        numbers.append(book.put(State.READY, **given))
        assert book.change(verdicts.record, numbers[-1], Verdict(1.0, Source.LLM), SampleKind.RL, "", 0)
    return numbers


def claim(book: Book, count: int = 1, seconds: float = HOUR, max_staleness: int = 8) -> Lease | None:
    lease: Lease | None = book.change(leases.claim, count, max_staleness, seconds)
    return lease


def taken(book: Book, count: int = 1, seconds: float = HOUR) -> Lease:
    lease = claim(book, count, seconds)
    assert lease is not None
    return lease


def confirm(book: Book, lease: Lease, version: int = 1, parent: int = 0) -> int:
    step: int = book.change(leases.confirm, lease.id, version, parent)
    return step


def states(book: Book, numbers: Any) -> set[State]:
    return {book.state(number) for number in numbers}


def let_time_pass(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    later = time.time() + seconds
    monkeypatch.setattr(leases.time, "time", lambda: later)


def test_confirmed_turns_are_a_step_that_counts_and_confirming_again_changes_nothing(book: Book) -> None:
    turns = judged(book, 3)
    lease = taken(book, 3)
    assert lease.turns == tuple(turns)
    assert states(book, turns) == {State.BATCHED}
    assert confirm(book, lease) == 1
    assert states(book, turns) == {State.APPLIED}
    before = book.everything()
    assert confirm(book, lease, version=2, parent=1) == 1
    assert book.everything() == before
    (update,) = book.change(training.load_steps)
    assert (update.step, update.version, update.turns, update.outcome) == (1, 1, tuple(turns), "applied")
    assert book.change(leases.last_end) is LeaseEnd.CONFIRMED


def test_two_claimers_never_get_the_same_turn(tmp_path: Path) -> None:
    book = Book(tmp_path)
    turns = judged(book, 20)

    async def claim_all() -> list[Lease | None]:
        return await asyncio.gather(*(book.ledger.write(leases.claim, 3, 8, HOUR) for _ in range(10)))

    claimed = asyncio.run(claim_all())
    got = [turn for lease in claimed if lease for turn in lease.turns]
    assert len(got) == len(set(got)) == 18
    assert set(got) <= set(turns)
    assert claimed.count(None) == 4, "two turns are left, and three were asked for"
    book.close()


def test_a_lease_that_ran_out_gives_its_turns_back_and_is_refused_when_it_is_confirmed_late(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = judged(book, 2)
    lease = taken(book, 2, seconds=60)
    let_time_pass(monkeypatch, 61)
    with pytest.raises(LeaseRefused, match=r"ran out 1 s ago.*lease_seconds"):
        confirm(book, lease)
    assert book.change(leases.expire) == 1
    assert states(book, turns) == {State.JUDGED}
    again = taken(book, 2)
    assert again.turns == lease.turns
    with pytest.raises(LeaseRefused, match="ran out"):
        confirm(book, lease)
    assert states(book, turns) == {State.BATCHED}, "the second claimer keeps them"
    assert confirm(book, again) == 1
    assert book.scalar("SELECT count(*) FROM update_turns") == 2


def test_a_claim_finds_the_turns_of_leases_that_ran_out_without_anybody_ending_them(
    book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns = judged(book, 2)
    taken(book, 2, seconds=60)
    assert claim(book) is None
    let_time_pass(monkeypatch, 61)
    assert taken(book).turns == (turns[0],)


def test_too_few_turns_are_left_alone(book: Book) -> None:
    turns = judged(book, 2)
    assert claim(book, 3) is None
    assert states(book, turns) == {State.JUDGED}
    assert book.scalar("SELECT count(*) FROM leases") == 0


def test_a_group_is_claimed_once_it_is_settled_and_as_a_whole(book: Book) -> None:
    method = a_method("rl", baseline="group")
    first = attempt(book, "g", "a", 1.0, turns=2)
    judge(book, method)
    assert claim(book) is None, "an attempt is missing"
    second = attempt(book, "g", "b", 0.0, turns=3)
    judge(book, method)
    assert taken(book).turns == (*first, *second)


def test_deleted_turns_stay_in_the_record_of_the_step_and_dropped_ones_do_not(book: Book) -> None:
    kept, gone, dropped = judged(book, 1)[0], judged(book, 1, session="other")[0], judged(book, 1)[0]
    lease = taken(book, 3)
    session = book.scalar("SELECT session FROM turns WHERE number = ?", gone)
    book.change(deletion.delete_sessions, [session])
    book.move(dropped, State.DROPPED)
    confirm(book, lease)
    assert book.state(kept) is State.APPLIED
    assert book.state(dropped) is State.DROPPED
    assert book.rows("SELECT turn FROM update_turns ORDER BY turn") == [(kept,), (gone,)]


@pytest.mark.parametrize("confirm_first", [True, False])
def test_a_leased_turn_that_is_dropped_and_rated_is_claimed_again_and_in_one_step_only(
    book: Book, confirm_first: bool
) -> None:
    kept, dropped = judged(book, 2)
    lease = taken(book, 2)
    book.move(dropped, State.DROPPED)
    rating = Feedback(1.0, "", Source.EXPLICIT)
    book.change(add_feedback, "me", book.read(dropped).completion, 0, rating)
    assert book.change(verdicts.record, dropped, Verdict(1.0, Source.EXPLICIT), SampleKind.RL, "", 1)
    if confirm_first:
        assert confirm(book, lease) == 1
        again = taken(book)
    else:
        again = taken(book)
        assert confirm(book, lease) == 1
    assert again.turns == (dropped,)
    assert confirm(book, again, version=2, parent=1) == 2
    assert states(book, (kept, dropped)) == {State.APPLIED}
    assert book.rows("SELECT number, turn FROM update_turns") == [(1, kept), (2, dropped)]


def test_weights_that_come_after_the_confirmation_hold_the_step(book: Book) -> None:
    (first,) = judged(book)
    confirm(book, taken(book), version=2, parent=1)
    book.change(training.add_weights, 3, 1, "18")
    assert book.change(training.policy_line, 3) == [3, 2, 1]
    assert book.change(training.versions_with, [first]) == {2, 3}
    book.change(training.add_weights, 4, 3, "19")
    assert book.change(training.policy_line, 4) == [4, 3, 2, 1]


def test_leases_hold_after_the_server_was_killed(tmp_path: Path) -> None:
    book = Book(tmp_path)
    turns = judged(book, 2)
    lease = taken(book, 2)
    # The second ledger sees what a process that comes after kill -9 sees: only what is on the disk.
    other = Ledger(tmp_path)
    assert asyncio.run(other.write(leases.confirm, lease.id, 1, 0)) == 1
    other.close()
    assert states(book, turns) == {State.APPLIED}
    assert confirm(book, lease) == 1
    book.close()


def test_a_learner_of_our_own_that_takes_over_the_run_ends_the_leases(book: Book) -> None:
    turns = judged(book, 2)
    lease = taken(book, 2)
    book.change(training.release_batches)
    assert states(book, turns) == {State.JUDGED}
    with pytest.raises(LeaseRefused, match="taken back"):
        confirm(book, lease)


def test_stale_turns_are_counted_in_confirmed_steps(book: Book) -> None:
    for step in range(1, 4):
        judged(book, 1, version=step)
        assert confirm(book, taken(book), version=step + 1, parent=step) == step
    old, new = judged(book, 1, version=2)[0], judged(book, 1, version=4)[0]
    assert claim(book, max_staleness=1) is not None
    assert book.read(old).reason == "stale: answered more than 1 policy versions ago"
    assert book.state(new) is State.BATCHED


def test_an_earlier_policy_that_serves_again_is_as_old_as_it_is(book: Book) -> None:
    """Whatever its new number: after a rollback, `forget --retrain`, or when it is loaded to be compared with."""
    for step in range(1, 5):
        judged(book, 1, version=step)
        confirm(book, taken(book), version=step + 1, parent=step)
    for version, parent in ((6, 2), (7, 6), (8, 5)):
        book.change(training.add_policy, version, parent)
    old, older, new = (judged(book, 1, version=version)[0] for version in (6, 7, 8))
    assert claim(book, max_staleness=2) is not None
    assert [book.state(turn) for turn in (old, older, new)] == [State.DROPPED, State.DROPPED, State.BATCHED]


def test_an_unknown_lease_is_refused(book: Book) -> None:
    with pytest.raises(UnknownLease, match="'nothing'"):
        book.change(leases.confirm, "nothing", 1, 0)


def test_weights_of_the_trainer_have_the_label_of_the_servers(book: Book) -> None:
    book.ledger.submit(training.add_policy, 1, 0, "17")
    judged(book)
    confirm(book, taken(book), version=1)
    assert [book.ledger.read(training.weights_label, version) for version in (1, 2)] == ["17", ""]
