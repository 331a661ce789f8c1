"""Training steps in the ledger: what is claimed, what counts, and how the ledger agrees with a checkpoint again."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.ledger import deletion, groups, training, verdicts
from openclaw_rl.ledger.errors import CannotJudge
from openclaw_rl.ledger.sessions import IllegalTransition
from openclaw_rl.ledger.status import read_status
from openclaw_rl.ledger.turns import add_feedback
from openclaw_rl.types import Batch, Feedback, SampleKind, Source, State, Verdict
from support.properties import examples
from support.records import Book

PATIENT = 1000


def judged(book: Book, count: int = 1, **given: Any) -> list[int]:
    numbers = [book.put(State.READY, **given) for _ in range(count)]
    for number in numbers:
        assert book.change(verdicts.record, number, Verdict(1.0, Source.LLM), SampleKind.RL, "", 0)
    return numbers


def claim(book: Book, count: int, step: int = 0, max_staleness: int = PATIENT) -> list[int]:
    claimed: list[int] = book.change(training.claim, count, step, max_staleness)
    return claimed


def apply(book: Book, step: int, count: int = 2, version: int | None = None) -> Batch:
    """A step on the next turns, from the claim to the record."""
    batch = Batch(step, version or step, tuple(claim(book, count)))
    book.change(training.apply_step, batch.step, batch.version, batch.turns)
    return batch


def states(book: Book, turns: Any) -> set[State]:
    return {book.state(turn) for turn in turns}


def applied(book: Book) -> dict[int, list[int]]:
    """The turns of each step that counts."""
    rows = book.rows(
        "SELECT s.step, u.turn FROM updates s LEFT JOIN update_turns u ON u.number = s.number "
        "WHERE s.outcome = 'applied' ORDER BY s.step, u.turn"
    )
    found: dict[int, list[int]] = {}
    for step, turn in rows:
        found.setdefault(step, []).extend([] if turn is None else [turn])
    return found


# claims


def test_the_longest_judged_are_claimed_first(book: Book) -> None:
    first, second, third = judged(book, 3)
    # Judged again, because somebody said something: it goes to the end.
    book.change(add_feedback, "me", book.read(first).completion, 0, Feedback(-1.0))
    assert book.change(verdicts.record, first, Verdict(-1.0, Source.EXPLICIT), SampleKind.RL, "", 1)
    assert claim(book, 2) == [second, third]
    assert claim(book, 2) == [first]
    assert claim(book, 2) == []
    assert states(book, [first, second, third]) == {State.BATCHED}


def test_only_judged_turns_are_claimed_and_counted(book: Book) -> None:
    for state in State:
        if state is not State.JUDGED:
            book.put(state)
    (turn,) = judged(book)
    assert groups.trainable(book.db) == 1
    assert claim(book, 10) == [turn]


def test_a_claimed_turn_cannot_be_judged_again(book: Book) -> None:
    (turn,) = judged(book)
    claim(book, 1)
    with pytest.raises(CannotJudge):
        book.change(add_feedback, "me", book.read(turn).completion, 0, Feedback(1.0))


def test_what_a_policy_too_many_steps_ago_answered_is_dropped_with_the_reason(book: Book) -> None:
    for step in range(1, 6):
        judged(book, 1)
        apply(book, step, 1)
    turns = {version: judged(book, 1, version=version)[0] for version in range(6)}
    assert claim(book, 10, step=5, max_staleness=2) == [turns[3], turns[4], turns[5]]
    assert states(book, [turns[0], turns[1], turns[2]]) == {State.DROPPED}
    assert book.read(turns[0]).reason == "stale: answered more than 2 policy versions ago"
    assert book.change(training.claim, 1, 5, 0) == []


def test_a_claim_given_back_can_be_claimed_again_in_the_same_order(book: Book) -> None:
    turns = judged(book, 3)
    assert claim(book, 2) == turns[:2]
    book.change(training.release_batches)
    assert claim(book, 3) == turns


# outcomes


def test_a_step_is_recorded_with_its_turns_version_and_metrics(book: Book) -> None:
    turns = judged(book, 2)
    claim(book, 2)
    book.change(training.apply_step, 1, 7, turns, {"reward": 0.5})
    assert applied(book) == {1: turns}
    assert states(book, turns) == {State.APPLIED}
    assert book.rows("SELECT step, version, outcome, metrics FROM updates") == [(1, 7, "applied", '{"reward": 0.5}')]
    assert training.latest_version(book.db) == 7


def test_a_step_is_recorded_whole_or_not_at_all(book: Book) -> None:
    claimed = judged(book, 1)
    claim(book, 1)
    (other,) = judged(book, 1)
    before = book.everything()
    with pytest.raises(IllegalTransition):
        book.change(training.apply_step, 1, 1, [*claimed, other])
    assert book.everything() == before


def test_a_quarantined_batch_is_dropped_and_listed_with_the_last_first(book: Book) -> None:
    one, other = judged(book, 2)
    for turn, reason in ((one, "the loss is not finite"), (other, "too far")):
        claim(book, 1)
        book.change(training.quarantine, 1, [turn], reason)
    listed = read_status(book.db, None, {}).as_json()["quarantined"]
    assert [(batch["turns"], batch["reason"]) for batch in listed] == [
        ((other,), "too far"),
        ((one,), "the loss is not finite"),
    ]
    assert book.read(one).reason == "quarantined: the loss is not finite"
    assert applied(book) == {}
    # The step that was not made is made with others.
    judged(book, 1)
    apply(book, 1, 1)


def test_the_latest_version_is_the_highest_that_anything_speaks_of(book: Book) -> None:
    assert training.latest_version(book.db) == 0
    judged(book, 1)
    apply(book, 1, 1, version=4)
    judged(book, 1, version=6)
    assert training.latest_version(book.db) == 6
    book.change(training.reconcile, 0, 0, ())
    assert training.latest_version(book.db) == 6


def test_the_record_of_steps_stays_when_their_turns_are_forgotten(book: Book) -> None:
    turns = judged(book, 3, session="secret")
    for step in (1, 2, 3):
        apply(book, step, 1)
    book.change(training.follow, 2)
    session = book.scalar("SELECT number FROM sessions")
    assert book.change(deletion.delete_sessions, [session]) == turns
    assert applied(book) == {1: turns[:1], 2: turns[1:2]}
    # Also the step that was rolled back: its policy may still be on disk.
    assert training.steps_with(book.db, turns) == [1, 2, 3]
    assert training.deleted_turns(book.db) == turns


# agreement with a checkpoint


def test_killed_between_the_claim_and_the_step_the_turns_are_given_back(book: Book) -> None:
    turns = judged(book, 2)
    claim(book, 2)
    assert book.change(training.reconcile, 0, 0, ()) == []
    assert states(book, turns) == {State.JUDGED}


def test_killed_after_the_record_and_before_the_checkpoint_the_step_is_made_again(book: Book) -> None:
    turns = judged(book, 6)
    batches = [apply(book, step) for step in (1, 2, 3)]
    assert book.change(training.reconcile, 1, 1, batches[:1]) == [2, 3]
    assert applied(book) == {1: turns[:2]}
    assert states(book, turns[2:]) == {State.JUDGED}
    assert [row[0] for row in book.rows("SELECT outcome FROM updates ORDER BY number")] == [
        "applied",
        "undone",
        "undone",
    ]
    assert apply(book, 2, version=4).turns == batches[1].turns
    assert apply(book, 3, version=5).turns == batches[2].turns


def test_a_step_that_only_the_checkpoint_remembers_counts(book: Book) -> None:
    turns = judged(book, 5)
    apply(book, 1)
    batches = (Batch(1, 1, tuple(turns[:2])), Batch(2, 4, tuple(turns[2:4])))
    claim(book, 2)
    for _ in range(2):
        assert book.change(training.reconcile, 4, 2, batches) == []
        assert applied(book) == {1: turns[:2], 2: turns[2:4]}
        assert states(book, turns[:4]) == {State.APPLIED}
    assert training.latest_version(book.db) == 4
    assert claim(book, 5) == turns[4:]


def test_a_turn_that_waits_to_be_judged_again_counts_too_if_a_checkpoint_holds_it(book: Book) -> None:
    """Otherwise it would be judged and trained on a second time."""
    (turn,) = judged(book)
    book.change(add_feedback, "me", book.read(turn).completion, 0, Feedback(1.0))
    book.change(training.reconcile, 1, 1, (Batch(1, 1, (turn,)),))
    assert book.state(turn) is State.APPLIED


def test_turns_that_were_forgotten_stay_forgotten(book: Book) -> None:
    secret = judged(book, 1, session="secret")
    kept = judged(book, 1)
    batch = apply(book, 1)
    book.change(deletion.delete_sessions, [book.scalar("SELECT session FROM turns WHERE number = ?", secret[0])])
    assert book.change(training.reconcile, 0, 0, ()) == [1]
    assert states(book, kept) == {State.JUDGED}
    book.change(training.reconcile, 1, 1, (batch,))
    # The record of the step still names both.
    assert applied(book) == {1: [*secret, *kept]}
    assert claim(book, 5) == []


def test_agreeing_twice_changes_nothing_more(book: Book) -> None:
    judged(book, 6)
    batches = [apply(book, step) for step in (1, 2)]
    claim(book, 2)
    book.change(training.reconcile, 1, 1, batches[:1])
    before = book.everything()
    assert book.change(training.reconcile, 1, 1, batches[:1]) == []
    assert book.everything() == before


def test_what_the_owner_left_behind_is_neither_undone_nor_trained_on_again(book: Book) -> None:
    turns = judged(book, 6)
    batches = [apply(book, step) for step in (1, 2, 3)]
    book.change(training.follow, 1)
    assert book.change(training.reconcile, 1, 1, batches[:1]) == []
    assert applied(book) == {1: turns[:2]}
    assert claim(book, 6) == []
    judged(book, 2)
    apply(book, 2, version=9)


def test_going_forward_again_lets_the_steps_in_that_policy_count(book: Book) -> None:
    turns = judged(book, 8)
    for step in (1, 2, 3):
        apply(book, step)
    book.change(training.add_policy, 4, 1)
    book.change(training.follow, 4)
    assert applied(book) == {1: turns[:2]}
    book.change(training.apply_step, 2, 5, claim(book, 2), None, 4)
    assert applied(book) == {1: turns[:2], 2: turns[6:]}
    book.change(training.add_policy, 6, 3)
    book.change(training.follow, 6)
    assert applied(book) == {1: turns[:2], 2: turns[2:4], 3: turns[4:6]}
    assert states(book, turns) == {State.APPLIED}
    assert [row[0] for row in book.rows("SELECT outcome FROM updates ORDER BY number")] == [
        *["applied"] * 3,
        "rolled_back",
    ]
    # A step made now is made from the policy that is served, whatever other policies there are.
    judged(book, 2)
    book.change(training.apply_step, 4, 7, claim(book, 2), None, 6)
    assert training.policy_line(book.db, 7) == [7, 6, 3, 2, 1]


@pytest.mark.parametrize("state", [State.READY, State.JUDGED, State.BATCHED, State.DROPPED])
def test_a_turn_in_the_policy_that_is_loaded_is_not_trained_on_again(book: Book, state: State) -> None:
    """Its step was undone, and it waits to be trained on again or was dropped meanwhile."""
    (turn,) = judged(book)
    apply(book, 1, 1)
    book.change(training.follow, 0, 0)
    if state is not State.JUDGED:
        book.move(turn, state)
    book.change(training.follow, 1)
    assert (applied(book), book.state(turn)) == ({1: [turn]}, State.APPLIED)


def test_which_policies_were_trained_on_a_turn(book: Book) -> None:
    first, second, third = judged(book, 3)
    for step in (1, 2):
        apply(book, step, 1)
    book.change(training.add_policy, 3, 1)  # the policy of step 1 serves again
    book.change(training.follow, 3)
    book.change(training.apply_step, 2, 4, claim(book, 1), None, 3)
    assert training.versions_with(book.db, [first]) == {1, 2, 3, 4}
    assert training.versions_with(book.db, [second]) == {2}
    assert training.versions_with(book.db, [third]) == {4}
    assert training.versions_with(book.db, [second, third]) == {2, 4}
    assert training.versions_with(book.db, []) == set()


class Learning:
    """A learner with its checkpoints beside a ledger, which dies whenever it is told to."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self.step = self.version = 0
        self.memory: list[Batch] = []
        self.saved: tuple[int, list[Batch], tuple[Batch, ...]] = (0, [], ())
        self.unsaved: list[Batch] = []

    def train(self, count: int, until: str) -> None:
        """A step, as far as the instant at which it all ends."""
        turns = claim(self.book, count)
        if until == "claim" or not turns:
            return
        self.step, self.version = self.step + 1, self.version + 1
        batch = Batch(self.step, self.version, tuple(turns))
        self.memory.append(batch)
        self.unsaved.append(batch)
        if until == "step":
            return
        if until != "checkpoint that knows more":
            self.book.change(training.apply_step, batch.step, batch.version, batch.turns)
        if until != "apply":
            self.save()

    def save(self) -> None:
        self.saved = (self.step, list(self.memory), tuple(self.unsaved))
        self.unsaved = []

    def restart(self) -> None:
        self.step, memory, batches = self.saved
        self.memory, self.unsaved = list(memory), []
        version = self.memory[-1].version if self.memory else 0
        self.book.change(training.reconcile, version, self.step, batches)

    def check(self) -> None:
        held = {batch.step: sorted(batch.turns) for batch in self.memory}
        assert applied(self.book) == held
        counted = [turn for turns in held.values() for turn in turns]
        assert len(set(counted)) == len(counted)
        rows = dict(self.book.rows("SELECT number, state FROM turns"))
        assert {turn for turn, state in rows.items() if state == State.APPLIED} == set(counted)
        assert set(rows.values()) <= {State.APPLIED, State.JUDGED}


INSTANTS = ("claim", "step", "apply", "save", "checkpoint that knows more")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.sampled_from(INSTANTS), st.booleans()), max_size=12))
@examples(25)
def test_however_often_it_is_killed_no_turn_is_lost_and_none_is_in_two_steps_that_count(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[int, int, str, bool]]
) -> None:
    book = Book(tmp_path_factory.mktemp("run"))
    try:
        learning = Learning(book)
        turns = []
        for arriving, count, until, killed in story:
            turns += judged(book, arriving)
            learning.train(count, until)
            if killed or until not in ("apply", "save"):
                learning.restart()
            learning.check()
        learning.restart()
        while groups.trainable(book.db):
            learning.train(random.Random(len(turns)).randint(1, 3), "save")
        learning.check()
        assert sorted(turn for batch in learning.memory for turn in batch.turns) == sorted(turns)
    finally:
        book.close()


def test_lost_steps_that_are_given_up_are_not_trained_on_even_if_they_were_being_made_again(book: Book) -> None:
    judged(book, 4)
    batches = [apply(book, 1), apply(book, 2)]
    assert book.change(training.reconcile, 0, 0, []) == [1, 2]
    book.change(training.claim_turns, batches[0].turns)
    (session,) = book.rows(f"SELECT session FROM turns WHERE number = {batches[1].turns[0]}")[0]
    book.change(deletion.delete_sessions, [session])
    book.change(training.give_up, batches)
    assert claim(book, 1) == []
    assert book.rows("SELECT DISTINCT outcome FROM updates") == [("rolled_back",)]
