"""The life of a ledger in random order, compared with a small model of it: no turn is lost, stuck or used twice."""

import contextlib
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from openclaw_rl.ledger import deletion, leases, training, turns, verdicts
from openclaw_rl.ledger.errors import CannotDelete, CannotJudge, DamagedTurn, LeaseRefused
from openclaw_rl.ledger.packing import read_text
from openclaw_rl.ledger.schema import create_tables, transaction
from openclaw_rl.ledger.sessions import drop_damaged, move
from openclaw_rl.types import Batch, Feedback, SampleKind, Source, State, StepOutcome, Verdict
from support.records import a_turn

OWNER = "me"
SESSIONS = ("one", "two", "three")
HOUR = 3600.0
NEXT = [{"role": "user", "content": "thanks"}]
#: The changes are few and small, so many of them fit into a run.
STEPS = 40
USED = (State.BATCHED, State.APPLIED)


@dataclass
class Known:
    """What the model knows of a turn."""

    session: str
    completion: str
    state: State = State.AWAITING
    followed: bool = False
    heard: int = 0


@dataclass
class Made:
    """A training step."""

    step: int
    version: int
    turns: tuple[int, ...]
    outcome: StepOutcome = StepOutcome.APPLIED


@dataclass
class Taken:
    """An open lease."""

    id: str
    turns: set[int]
    left: float


@dataclass
class Saved:
    """What the next start continues from."""

    step: int = 0
    version: int = 0


@dataclass
class Model:
    """What the ledger should hold."""

    turns: dict[int, Known] = field(default_factory=dict)
    steps: list[Made] = field(default_factory=list)
    leases: list[Taken] = field(default_factory=list)
    parents: dict[int, int] = field(default_factory=dict)
    lost: list[Batch] = field(default_factory=list)
    step: int = 0
    version: int = 0

    def line(self, version: int) -> set[int]:
        """The versions that a version was made from, with itself."""
        made = set()
        while version:
            made.add(version)
            version = self.parents[version]
        return made

    def in_state(self, *states: State) -> list[int]:
        return [number for number, turn in self.turns.items() if turn.state in states]

    def leave_lease(self, number: int) -> None:
        for lease in self.leases:
            lease.turns.discard(number)

    def release(self) -> None:
        for number in self.in_state(State.BATCHED):
            self.turns[number].state = State.JUDGED
        self.leases = []

    def follow(self, version: int, undo_after: int | None = None) -> None:
        """Let exactly the steps in a policy count."""
        line = self.line(version)
        for made in self.steps:
            if made.outcome is StepOutcome.APPLIED and made.version not in line:
                undone = undo_after is not None and made.version > undo_after
                made.outcome = StepOutcome.UNDONE if undone else StepOutcome.ROLLED_BACK
                for number in made.turns if undone else ():
                    if number in self.turns and self.turns[number].state is State.APPLIED:
                        self.turns[number].state = State.JUDGED
        for made in self.steps:
            if made.outcome in (StepOutcome.UNDONE, StepOutcome.ROLLED_BACK) and made.version in line:
                made.outcome = StepOutcome.APPLIED
                self.apply(made.turns)

    def apply(self, numbers: tuple[int, ...]) -> None:
        for number in numbers:
            if number in self.turns and self.turns[number].state in training.TOWARDS_APPLIED:
                self.turns[number].state = State.APPLIED


class LedgerLife(RuleBasedStateMachine):
    """One ledger, with a learner of its own and an outside trainer taking turns."""

    @initialize()
    def begin(self) -> None:
        self.db = sqlite3.connect(":memory:", isolation_level=None)
        self.db.row_factory = sqlite3.Row
        self.db.text_factory = read_text
        self.db.execute("PRAGMA foreign_keys = ON")
        create_tables(self.db)
        self.model = Model()
        self.saved = Saved()

    def teardown(self) -> None:
        if hasattr(self, "db"):
            self.db.close()

    def change(self, change: Any, *arguments: Any, **named: Any) -> Any:
        with transaction(self.db):
            return change(self.db, *arguments, **named)

    @contextlib.contextmanager
    def crash(self) -> Iterator[None]:
        """Lose what the block changes, as when the process is killed before the commit."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        finally:
            self.db.execute("ROLLBACK")

    def choose(self, data: st.DataObject, *states: State) -> int:
        return data.draw(st.sampled_from(self.model.in_state(*states)))

    def has(self, *states: State) -> bool:
        return bool(self.model.in_state(*states))

    # Turns come, are followed, rated and judged

    @rule(session=st.sampled_from(SESSIONS), count=st.integers(1, 3), judged=st.booleans())
    def record(self, session: str, count: int, judged: bool) -> None:
        """Record turns; most lives are about what happens once they are judged."""
        for _ in range(count):
            turn = a_turn(session, OWNER, version=self.model.version)
            (number,) = self.change(turns.capture, [turn], "test", None, 0)
            self.model.turns[number] = Known(session, turn.completion)
            if judged:
                self.follow(number)
                self.decide(number, SampleKind.RL)

    @precondition(lambda self: self.model.turns)
    @rule(data=st.data())
    def say_something_next(self, data: st.DataObject) -> None:
        self.follow(self.choose(data, *State))

    def follow(self, number: int) -> None:
        self.change(turns.set_next_state, number, NEXT)
        known = self.model.turns[number]
        if not known.followed:
            known.followed = True
            if known.state in (State.AWAITING, State.DROPPED):
                known.state = State.READY

    @precondition(lambda self: self.model.turns)
    @rule(data=st.data(), score=st.sampled_from((1.0, -1.0)))
    def rate(self, data: st.DataObject, score: float) -> None:
        number = self.choose(data, *State)
        known = self.model.turns[number]
        arguments = (OWNER, known.completion, 0, Feedback(score, "", Source.EXPLICIT))
        if known.state in USED:
            with pytest.raises(CannotJudge):
                self.change(turns.add_feedback, *arguments)
            return
        self.change(turns.add_feedback, *arguments)
        known.state = State.READY
        known.heard += 1

    @precondition(lambda self: self.has(State.READY))
    @rule(data=st.data(), sample=st.sampled_from((SampleKind.RL, SampleKind.RL, None)), late=st.booleans())
    def judge(self, data: st.DataObject, sample: SampleKind | None, late: bool) -> None:
        self.decide(self.choose(data, State.READY), sample, late)

    def decide(self, number: int, sample: SampleKind | None, late: bool = False) -> None:
        known = self.model.turns[number]
        heard = known.heard - late
        stored = self.change(verdicts.record, number, Verdict(1.0, Source.LLM), sample, "no signal", heard)
        assert stored is not late, "a verdict that did not hear all feedback is not stored"
        if stored:
            known.state = State.JUDGED if sample else State.DROPPED

    @precondition(lambda self: self.has(State.BATCHED, State.JUDGED, State.READY, State.AWAITING))
    @rule(data=st.data(), damaged=st.booleans())
    def drop(self, data: st.DataObject, damaged: bool) -> None:
        """Also turns that a trainer has leased, as when they turn out to have no signal or to be damaged."""
        leased = self.model.in_state(State.BATCHED)
        number = data.draw(st.sampled_from(leased or self.model.in_state(State.JUDGED, State.READY, State.AWAITING)))
        if damaged:
            self.change(drop_damaged, DamagedTurn(number, "a bit flipped"))
        else:
            self.change(move, number, State.DROPPED, "no signal")
        self.model.turns[number].state = State.DROPPED
        self.model.leave_lease(number)

    # An outside trainer

    @precondition(lambda self: self.has(State.JUDGED) and not self.model.lost)
    @rule(count=st.integers(1, 3), seconds=st.sampled_from((1.0, HOUR)))
    def claim(self, count: int, seconds: float) -> None:
        self.expire()
        lease = self.change(leases.claim, count, 1000, seconds)
        assert (lease is None) == (len(self.model.in_state(State.JUDGED)) < count)
        if lease is not None:
            for number in lease.turns:
                assert self.model.turns[number].state is State.JUDGED, "a turn is claimed once"
                self.model.turns[number].state = State.BATCHED
            self.model.leases.append(Taken(lease.id, set(lease.turns), seconds))

    @precondition(lambda self: self.model.leases and not self.model.lost)
    @rule(data=st.data(), killed=st.booleans())
    def confirm(self, data: st.DataObject, killed: bool) -> None:
        lease = data.draw(st.sampled_from(self.model.leases))
        version = self.change(training.latest_version) + 1
        arguments = (lease.id, version, self.model.version)
        if lease.left <= 0:
            with pytest.raises(LeaseRefused):
                self.change(leases.confirm, *arguments)
            return
        if killed:
            with self.crash():
                leases.confirm(self.db, *arguments)
            return
        step = self.change(leases.confirm, *arguments)
        assert step == self.model.step + 1
        assert self.change(leases.confirm, lease.id, version + 1, version) == step, "again, it changes nothing"
        self.model.leases.remove(lease)
        self.add_step(version, tuple(sorted(lease.turns)))

    @precondition(lambda self: self.model.leases)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.model.leases))
        self.change(leases.release, lease.id)
        self.end(lease)

    @precondition(lambda self: self.model.leases)
    @rule()
    def wait(self) -> None:
        """Let short leases run out. Nobody has to notice at once."""
        self.db.execute("UPDATE leases SET expires = expires - 10")
        for lease in self.model.leases:
            lease.left -= 10

    @precondition(lambda self: any(lease.left <= 0 for lease in self.model.leases))
    @rule()
    def expire(self) -> None:
        ended = [lease for lease in self.model.leases if lease.left <= 0]
        assert self.change(leases.expire) == len(ended)
        for lease in ended:
            self.end(lease)

    def end(self, lease: Taken) -> None:
        self.model.leases.remove(lease)
        for number in lease.turns & set(self.model.turns):
            self.model.turns[number].state = State.JUDGED

    # A learner of its own

    @precondition(lambda self: not self.model.leases and (self.model.lost or self.has(State.JUDGED)))
    @rule(count=st.integers(1, 3), fate=st.sampled_from(("made", "made", "refused", "taken back", "killed")))
    def train(self, count: int, fate: str) -> None:
        lost = self.model.lost[0] if self.model.lost else None
        if lost is not None:
            numbers = self.change(training.claim_turns, lost.turns)
        else:
            numbers = self.change(training.claim, count, self.model.step, 1000)
        for number in numbers:
            assert self.model.turns[number].state is State.JUDGED
            self.model.turns[number].state = State.BATCHED
        if not numbers:
            if lost is not None:
                self.skip_lost()
            return
        if fate == "made":
            version = (lost.version if lost else 0) or self.change(training.latest_version) + 1
            self.change(training.apply_step, self.model.step + 1, version, numbers, None, self.model.version)
            self.add_step(version, tuple(numbers))
            self.model.lost = self.model.lost[1:]
        elif fate == "killed":
            with self.crash():
                training.apply_step(self.db, self.model.step + 1, 1000, numbers, None, self.model.version)
            self.restart()
        else:
            if fate == "refused":
                self.change(training.quarantine, self.model.step + 1, numbers, "not finite")
                for number in numbers:
                    self.model.turns[number].state = State.DROPPED
            self.change(training.release_batches)
            self.model.release()
            if lost is not None and fate == "refused":
                self.skip_lost()

    def skip_lost(self) -> None:
        rest = self.model.lost[1:]
        self.model.lost = [replace(batch, step=batch.step - 1, version=0) for batch in rest]

    def add_step(self, version: int, numbers: tuple[int, ...]) -> None:
        self.model.step += 1
        again = next((made for made in self.model.steps if made.version == version), None)
        if again is not None:
            again.outcome = StepOutcome.APPLIED
        else:
            self.model.parents[version] = self.model.version
            self.model.steps.append(Made(self.model.step, version, numbers))
        self.model.version = version
        for number in numbers:
            if number in self.model.turns:
                self.model.turns[number].state = State.APPLIED

    @precondition(lambda self: self.model.version != self.saved.version and not self.model.lost)
    @rule()
    def save(self) -> None:
        self.saved = Saved(self.model.step, self.model.version)

    @precondition(lambda self: self.model.leases or self.model.version != self.saved.version)
    @rule()
    def restart(self) -> None:
        """The learner's memory is gone: the steps since the last save are to be made again."""
        saved = self.saved
        self.change(training.reconcile, saved.version, saved.step, ())
        self.model.release()
        self.model.follow(saved.version, undo_after=saved.version)
        self.model.step, self.model.version = saved.step, saved.version
        self.model.lost = training.steps_after(self.db, saved.version)

    @precondition(lambda self: self.model.steps)
    @rule(data=st.data(), retrain=st.booleans(), killed=st.booleans())
    def roll_back(self, data: st.DataObject, retrain: bool, killed: bool) -> None:
        """Serve an earlier policy as a new version, and continue from it."""
        earlier = [made for made in self.model.steps if made.outcome is StepOutcome.APPLIED]
        to = data.draw(st.sampled_from([Made(0, 0, ()), *earlier]))
        version = self.change(training.latest_version) + 1
        self.change(training.add_policy, version, to.version)
        self.model.parents[version] = to.version
        undo_after = 0 if retrain else None
        if not retrain:
            self.change(training.give_up, self.model.lost)
            self.model.release()
            for batch in self.model.lost:
                made = next((one for one in self.model.steps if one.version == batch.version), None)
                if made is not None and made.outcome is StepOutcome.UNDONE:
                    made.outcome = StepOutcome.ROLLED_BACK
                self.model.apply(batch.turns)
        self.model.lost = []
        if killed:
            self.restart()
            return
        self.change(training.follow, version, undo_after=undo_after)
        self.model.follow(version, undo_after)
        self.model.step, self.model.version = to.step, version
        self.saved = Saved(to.step, version)

    # Owners delete

    @precondition(lambda self: len(self.model.turns) > len(SESSIONS))
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        session = data.draw(st.sampled_from(sorted({turn.session for turn in self.model.turns.values()})))
        (number,) = self.db.execute("SELECT number FROM sessions WHERE id = ?", (session,)).fetchone()
        gone = self.change(deletion.delete_sessions, [number])
        assert set(gone) == {number for number, turn in self.model.turns.items() if turn.session == session}
        for number in gone:
            del self.model.turns[number]

    @precondition(lambda self: len(self.model.turns) > len(SESSIONS))
    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        number = self.choose(data, *State)
        known = self.model.turns[number]
        if known.state is State.BATCHED:
            with pytest.raises(CannotDelete):
                self.change(deletion.delete_answer, OWNER, known.completion)
            return
        self.change(deletion.delete_answer, OWNER, known.completion)
        del self.model.turns[number]

    # What always holds

    @invariant()
    def the_ledger_is_as_the_model_says(self) -> None:
        if not hasattr(self, "model"):
            return
        model = self.model
        rows = self.db.execute("SELECT number, state, reason FROM turns").fetchall()
        assert {row["number"]: row["state"] for row in rows} == {n: turn.state for n, turn in model.turns.items()}
        assert all(row["reason"] for row in rows if row["state"] == State.DROPPED)
        made = [(u.step, u.version, u.turns, u.outcome) for u in training.load_steps(self.db) if u.version]
        assert made == [(one.step, one.version, one.turns, one.outcome) for one in model.steps]
        opened = {lease.id: set(lease.turns) for lease in leases.open_leases(self.db)}
        assert opened == {lease.id: lease.turns for lease in model.leases}

    @invariant()
    def no_turn_is_used_twice(self) -> None:
        if not hasattr(self, "model"):
            return
        counted = [turn for made in self.model.steps if made.outcome is StepOutcome.APPLIED for turn in made.turns]
        assert len(counted) == len(set(counted)), "a turn is in one step that counts"
        leased = [turn for lease in self.model.leases for turn in lease.turns]
        assert len(leased) == len(set(leased))
        assert not set(leased) & set(counted)
        line = self.model.line(self.model.version)
        assert {made.version for made in self.model.steps if made.outcome is StepOutcome.APPLIED} <= line
        forgotten = {turn for turn in counted if turn not in self.model.turns}
        if forgotten:
            assert self.model.version in training.versions_with_deleted_turns(self.db)


@pytest.mark.parametrize("runs", [25, pytest.param(2000, marks=pytest.mark.more)])
def test_any_life_of_a_ledger_is_as_the_model_says(runs: int) -> None:
    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]
    run_state_machine_as_test(
        LedgerLife,
        settings=settings(max_examples=runs, stateful_step_count=STEPS, deadline=None, suppress_health_check=checks),
    )
