"""Groups from reward to step: with judging and learning running beside, and killed at any moment."""

import asyncio
import random
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.learn import samples
from openclaw_rl.ledger import deletion, episodes
from openclaw_rl.ledger.turns import load_turn
from openclaw_rl.types import EpisodeMode, EpisodeResult, SessionKey, State, StoredTurn, TrainingSequence
from support.episodes import attempt, judge
from support.judging import judging
from support.learning_run import LearningRun, a_run, flat
from support.methods import a_method
from support.records import Book, a_turn

METHOD = "rl"


def group_method() -> Any:
    return a_method(METHOD, baseline="group")


def note_advantages(run: LearningRun) -> dict[int, float]:
    """What each turn learns in the steps that follow."""
    learned: dict[int, float] = {}

    def step(sequences: list[TrainingSequence]) -> None:
        learned.update((span.turn, span.advantages[0]) for sequence in sequences for span in sequence.spans)

    run.learner.hooks["step"] = step
    return learned


async def test_a_group_is_trained_on_in_one_step_and_a_lost_step_is_made_again_with_the_same_numbers(
    tmp_path: Path,
) -> None:
    async with a_run(tmp_path / "run", method=group_method(), save_interval=20) as run:
        await run.start()
        first = note_advantages(run)
        turns = [t for n, r in enumerate((1.0, 0.25, 0.0)) for t in attempt(run.book, "g", f"a{n}", r, turns=3, size=3)]
        async with judging(run.book, method=METHOD, baseline="group"):
            await run.trained(*turns)
        assert run.applied() == [turns], "one step, although --batch-size is smaller"
        await run.kill()
        await run.start(learning=False)
        again = note_advantages(run)
        run.learn()
        await run.trained(*turns)
        assert again == first
        assert run.outcomes() == ["applied"]


async def test_what_a_step_reports_about_episodes(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", method=group_method()) as run:
        await run.start()
        for name in "ab":
            attempt(run.book, "constant", f"c{name}", 1.0)
        turns = [
            *attempt(run.book, "g", "a", 3.0, turns=2),
            *attempt(run.book, "g", "b", 1.0),
        ]
        async with judging(run.book, method=METHOD, baseline="group"):
            await run.trained(*turns)
        (update,) = run.book.rows("SELECT metrics FROM updates")
        assert '"episode_reward": 2.0' in update[0]
        assert '"episodes": 2' in update[0]
        assert '"groups": 1' in update[0]
        assert '"constant_groups": 1' in update[0]


async def test_a_smaller_batch_is_a_whole_group_too(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", method=group_method(), batch_size=10, batch_timeout=0.01) as run:
        await run.start()
        turns = [t for n, r in enumerate((1.0, 0.0)) for t in attempt(run.book, "g", f"a{n}", r, turns=2)]
        async with judging(run.book, method=METHOD, baseline="group"):
            await run.trained(*turns)
        assert run.applied() == [turns]


async def test_a_batch_is_loaded_beside_the_event_loop_and_a_group_may_lose_an_attempt_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_run(tmp_path / "run", method=group_method()) as run:
        turns = [t for n, r in enumerate((1.0, 0.0, 5.0)) for t in attempt(run.book, "g", f"a{n}", r, size=3)]
        judge(run.book, group_method())
        threads = set[threading.Thread]()

        def load_after_a_deletion(db: sqlite3.Connection, turn: int) -> StoredTurn:
            threads.add(threading.current_thread())
            if gone := run.book.rows("SELECT number FROM sessions WHERE id = 'a2'"):
                run.book.change(deletion.delete_sessions, list(gone[0]))
            return load_turn(db, turn)

        monkeypatch.setattr(samples, "load_turn", load_after_a_deletion)
        await run.start(learning=False)
        learned = note_advantages(run)
        run.learn()
        await run.trained(*turns[:2])
        assert threading.current_thread() not in threads
        assert list(learned.values()) == [0.5, -0.5]


async def harness(book: Book, names: list[str], draw: random.Random) -> None:
    """Play and reward three attempts of each group, of one, two and three turns; some of the longest fail."""

    async def one(name: str, place: int) -> None:
        key = SessionKey("me", f"{name}-{place}")
        for step in range(1 + place):
            turn = a_turn(key.id, completion=f"{key.id}-{step}", request_key=f"{key.id}-{step}".encode())
            if not book.scalar("SELECT count(*) FROM turns WHERE completion = ?", turn.completion):
                await book.ledger.capture([turn], "test", None, 0, episode=EpisodeMode.TRAIN)
            await asyncio.sleep(0)
        failed = place == 2 and name.endswith("0")
        result = EpisodeResult(None if failed else float(place**2), "broke" if failed else None, "t", name, 3)
        assert not await book.ledger.write(episodes.end, key, result, 8)

    attempts = [(name, place) for name in names for place in range(3)]
    draw.shuffle(attempts)
    await asyncio.gather(*(one(*attempt) for attempt in attempts))


def trained_turns(name: str) -> int:
    return 1 + 2 + (0 if name.endswith("0") else 3)


def check_groups(run: LearningRun, names: list[str]) -> None:
    """Every group is in one step, and each of its turns is trained on once or dropped for a reason."""
    run.check()
    steps = run.applied()
    for name in names:
        rows = run.book.rows(
            "SELECT t.number, t.state, t.reason FROM turns t JOIN sessions s ON s.number = t.session "
            f"WHERE s.id LIKE '{name}-%'"
        )
        trained = {number for number, state, _ in rows if state == State.APPLIED}
        assert len(trained) == trained_turns(name), rows
        assert sum(bool(trained & set(step)) for step in steps) == 1, "a group is never divided"
        assert all(state == State.APPLIED or reason for _, state, reason in rows)


async def test_groups_that_are_rewarded_side_by_side_are_each_trained_on_as_a_whole(tmp_path: Path) -> None:
    names = [f"g{n}" for n in range(12)]
    async with a_run(tmp_path / "run", method=group_method(), max_staleness=1000) as run:
        await run.start()
        async with judging(run.book, method=METHOD, baseline="group"):
            await harness(run.book, names, random.Random(1))
            await run.until(lambda: len(flat(run.applied())) == sum(map(trained_turns, names)) and run.resting())
            check_groups(run, names)


def die_after(book: Book, writes: int) -> Callable[[], bool]:
    """Let this many changes be made, and none after them, as when the process is killed; whether that has happened."""
    submit, left = book.ledger.writer.submit, [writes]

    def dying(change: Any) -> "Future[Any]":
        left[0] -= 1
        if left[0] >= 0:
            return submit(change)
        return Future()

    book.ledger.writer.submit = dying  # type: ignore[method-assign]
    return lambda: left[0] < 0


#: The changes of this scenario: 6 turns and 3 ends, 3 to 6 verdicts, settling, and what a step writes.
MAX_WRITES = 24


@pytest.mark.parametrize("writes", range(0, MAX_WRITES, 3))
async def test_killed_between_any_two_writes_no_group_is_divided_and_nothing_is_trained_on_twice(
    tmp_path: Path, writes: int
) -> None:
    names = ["g0"]
    for offset in range(3):
        folder = tmp_path / f"run{offset}"
        async with a_run(folder, method=group_method()) as run:
            is_dead = die_after(run.book, writes + offset)
            start = asyncio.create_task(run.start())
            async with judging(run.book, method=METHOD, baseline="group"):
                playing = asyncio.create_task(harness(run.book, names, random.Random(writes)))
                async with asyncio.timeout(30):
                    while not is_dead() and not (start.done() and run.resting() and flat(run.applied())):
                        await asyncio.sleep(0.001)
                playing.cancel()
                start.cancel()
                await asyncio.gather(playing, start, return_exceptions=True)
            await run.close()
            run.book = Book(folder)
            await run.start()
            async with judging(run.book, method=METHOD, baseline="group"):
                await harness(run.book, names, random.Random(writes))
                await run.until(lambda: bool(flat(run.applied())) and run.resting())
            check_groups(run, names)
