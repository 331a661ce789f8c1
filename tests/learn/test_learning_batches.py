"""Which turns a step takes."""

import sqlite3
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from openclaw_rl.learn import loop as module
from openclaw_rl.learn.step import Phase
from openclaw_rl.ledger import deletion, verdicts
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.sessions import move
from openclaw_rl.types import SampleKind, Source, State, Verdict
from support.learning_run import SECONDS, LearningRun, a_run, flat
from support.methods import a_method
from support.records import intercept

CENTRED = a_method("rl", baseline="batch")


async def test_a_step_takes_as_many_turns_as_a_batch_has_the_longest_judged_first(run: LearningRun) -> None:
    await run.start()
    first, second, third = run.judged(3)
    await run.trained(first, second)
    assert run.states([third]) == {State.JUDGED}
    assert run.loop.status() == "1 of the 2 judged turns that a step needs (--batch-size)"
    (fourth,) = run.judged(1)
    await run.trained(third, fourth)
    assert run.learner.policy == [[first, second], [third, fourth]]
    assert run.sampler.newest_version == 2


async def test_the_status_never_names_more_turns_than_a_step_needs(run: LearningRun) -> None:
    await run.start(learning=False)
    run.judged(9)
    assert run.loop.status() == "preparing: it loads the weights to continue from"
    run.loop.phases.enter(Phase.WAITING)
    assert run.loop.status() == "all 2 judged turns that a step needs (--batch-size), and 7 more"


async def test_what_was_judged_before_the_start_is_trained_on(run: LearningRun) -> None:
    turns = run.judged(4, version=0)
    await run.start()
    await run.trained(*turns)


async def test_a_smaller_batch_is_trained_on_after_the_batch_timeout(tmp_path: Path) -> None:
    """Also if no change of the ledger wakes the loop."""
    async with a_run(tmp_path / "run", batch_size=4, batch_timeout=0.1, idle_seconds=10 * SECONDS) as run:
        await run.start()
        turns = run.judged(3)
        await run.trained(*turns)
        assert run.learner.policy == [turns]


async def test_a_smaller_batch_waits_for_its_own_batch_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait begins with its first turn, not with that of the batch before."""
    clock, looks = SimpleNamespace(now=1000.0), set[tuple[float, int]]()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    async with a_run(tmp_path / "run", batch_timeout=100.0) as run:
        trainable = module.trainable

        def look(db: sqlite3.Connection, _line: str | None) -> int:
            looks.add((clock.now, trainable(db)))
            return trainable(db)

        monkeypatch.setattr(module, "trainable", look)
        await run.start()
        first = run.judged(1)
        await run.until(lambda: (1000.0, 1) in looks)
        await run.rest()
        assert run.learner.policy == []
        clock.now += 99
        first += run.judged(1)
        second = run.judged(1)
        await run.trained(*first)
        await run.until(lambda: (1099.0, 1) in looks)
        clock.now += 99
        run.book.put(State.READY)  # a change of the ledger wakes the loop
        await run.until(lambda: (1198.0, 1) in looks)
        await run.rest()
        assert run.learner.policy == [first]
        clock.now += 1
        run.book.put(State.READY)
        await run.trained(*second)


async def test_turns_without_a_gradient_never_count_towards_a_batch(run: LearningRun) -> None:
    """A neutral turn is dropped when it is judged; one that the method cannot use is dropped when it is claimed."""
    await run.start()
    neutral = run.book.put(State.READY)
    run.book.change(verdicts.record, neutral, Verdict(0.0, Source.LLM), None, "the judge is neutral", 0)
    hinted = run.book.put(State.READY)
    run.book.change(verdicts.record, hinted, Verdict(None), SampleKind.OPD, "", 0)
    (good,) = run.judged(1)
    await run.until(lambda: run.book.state(hinted) is State.DROPPED)
    await run.rest()
    assert "no signal" in run.book.read(hinted).reason
    assert run.learner.policy == []
    assert run.states([good]) == {State.JUDGED}
    (another,) = run.judged(1)
    await run.trained(good, another)
    assert run.learner.policy == [[good, another]]


async def test_no_step_is_made_of_a_batch_that_was_judged_alike(tmp_path: Path) -> None:
    """With no gradient the optimiser would walk on by its momentum, and the turns would count as learned from."""
    async with a_run(tmp_path / "run", method=CENTRED) as run:
        await run.start()
        alike = run.judged(2, score=-1.0)
        await run.until(lambda: run.states(alike) == {State.DROPPED})
        await run.rest()
        assert run.book.read(alike[0]).reason == "no signal: all signals of its batch are equal (--baseline batch)"
        assert "step" not in run.learner.calls
        assert run.outcomes() == []
        different = [*run.judged(1, score=1.0), *run.judged(1, score=-1.0)]
        await run.trained(*different)
        assert run.learner.policy == [different]


async def test_a_batch_of_one_after_the_batch_timeout_is_measured_from_nothing(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", method=CENTRED, batch_timeout=0.01) as run:
        seen: list[float] = []
        await run.start()
        run.learner.hooks["step"] = lambda sequences: seen.extend(sequences[0].spans[0].advantages)
        await run.trained(*run.judged(1, score=-1.0))
        assert set(seen) == {-1.0}


async def test_a_locked_ledger_loses_no_turn_of_a_batch_that_was_judged_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is dropped or waits on, and none is left claimed."""
    async with a_run(tmp_path / "run", method=CENTRED) as run:
        await run.start()
        calls: list[int] = []
        write = run.book.ledger.write

        async def locked(turn: int, state: State, reason: str) -> None:
            calls.append(turn)
            if len(calls) == 2:
                raise LedgerError("database is locked")
            await write(move, turn, state, reason)

        intercept(monkeypatch, run.book.ledger, move, locked)
        first, second = run.judged(2, score=-1.0)
        await run.until(lambda: calls == [first, second] and run.states([second]) == {State.JUDGED})
        assert run.states([first]) == {State.DROPPED}
        (other,) = run.judged(1, score=1.0)
        await run.trained(second, other)


async def test_no_more_steps_than_max_steps(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", max_steps=2) as run:
        await run.start()
        turns = run.judged(6)
        await run.trained(*turns[:4])
        assert run.states(turns[4:]) == {State.JUDGED}
        assert run.loop.status() == "done: --max-steps 2 have been made"


async def test_turns_of_too_old_a_policy_are_dropped_with_the_reason(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", max_staleness=2) as run:
        await run.start()
        for _ in range(3):
            await run.trained(*run.judged())
        assert run.sampler.newest_version == 3
        old = run.judged(1, version=0)
        fresh = run.judged(2, version=1)
        await run.trained(*fresh)
        assert run.states(old) == {State.DROPPED}
        assert run.book.read(old[0]).reason == "stale: answered more than 2 policy versions ago"


async def test_a_turn_that_is_forgotten_during_its_step_is_not_learned_from(run: LearningRun) -> None:
    await run.start()

    def forget(_sequences: Any) -> None:
        del run.learner.hooks["step"]
        session = run.book.scalar("SELECT session FROM turns WHERE number = ?", forgotten)
        run.book.change(deletion.delete_sessions, [session])

    run.learner.hooks["step"] = forget
    (forgotten,) = run.judged(1, session="secret")
    (kept, another) = run.judged(2)
    await run.trained(kept, another)
    assert run.learner.policy == [[kept, another]]
    assert all(forgotten not in flat(policy) for policy in run.sampler.served.values())


async def test_a_turn_that_is_forgotten_during_its_step_costs_no_other_step(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=100) as run:
        await run.start()
        before = run.judged()
        await run.trained(*before)

        def forget(_sequences: Any) -> None:
            del run.learner.hooks["step"]
            run.book.change(
                deletion.delete_sessions, [run.book.scalar("SELECT session FROM turns WHERE number = ?", forgotten)]
            )

        run.learner.hooks["step"] = forget
        (forgotten,) = run.judged(1, session="secret")
        rest = run.judged(2)
        await run.trained(*before, *rest)
        assert run.outcomes() == ["applied", "applied"]
