"""From judged turns to a policy that serves: every turn once, whatever breaks, and learner, ledger, checkpoints and
sampler always of one mind."""

import asyncio
import contextlib
import json
import logging
import random
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, generate_latest

from openclaw_rl.api.operations import OperationFailed
from openclaw_rl.app.background import Loops
from openclaw_rl.app.config import Config
from openclaw_rl.engines.base import EngineUnavailable, QueueFull, StepRefused
from openclaw_rl.engines.policy_ref import PolicyRef
from openclaw_rl.learn import loop as module
from openclaw_rl.learn.build import where_to_begin
from openclaw_rl.learn.checkpoints import Checkpoint, Checkpoints
from openclaw_rl.learn.loop import LearnLoop, LearnSettings
from openclaw_rl.learn.methods import Weights
from openclaw_rl.learn.policies import Policies
from openclaw_rl.learn.reporting import JsonLines, Prometheus, Reporter
from openclaw_rl.ledger import changes, verdicts
from openclaw_rl.ledger.status import read_status
from openclaw_rl.types import SampleKind, Source, State, Verdict
from support.fakes import ScriptedLearner, ScriptedSampler, read_policy
from support.records import Book

SECONDS = 10
CENTRED = Weights(0, 1, centred=True)


class PickySampler(ScriptedSampler):
    """As particular about versions as a real one: a number is never used for two policies."""

    def __init__(self) -> None:
        super().__init__(lambda request, index: [1])
        self.latest = 0
        self.candidates: set[int] = set()
        self.served: dict[int, list[list[int]]] = {0: []}
        self.hook: Callable[[int], Any] | None = None

    @property
    def newest_version(self) -> int:
        return max(set(self.served) - self.candidates)

    @newest_version.setter
    def newest_version(self, version: int) -> None:
        pass

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False) -> None:
        answer = self.hook(version) if self.hook else None
        if answer is not None:
            await answer
        if version <= self.latest:
            raise EngineUnavailable(f"Policy version {version} is not newer than {self.latest}.")
        self.latest = version
        if candidate:
            self.candidates.add(version)
        self.served[version] = read_policy(policy.folder)

    def promote(self, version: int) -> None:
        self.candidates.discard(version)

    def retract(self, version: int) -> None:
        self.served.pop(version, None)
        self.candidates.discard(version)


class Examiner:
    """A gate that gives policy versions the marks it is told to."""

    margin = 0.1

    def __init__(self, mark: Callable[[int], float]) -> None:
        self.mark = mark
        self.examined: list[int] = []

    async def examine(self, version: int) -> float:
        self.examined.append(version)
        return self.mark(version)


class Run:
    """A run directory and the server in it, which can be killed and started again."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.book = Book(folder)
        self.settings = {"batch_size": 2, "max_steps": 1000, "max_staleness": 8, "save_interval": 2, **settings}
        self.settings.setdefault("batch_timeout", None)
        self.keep = self.settings.pop("keep_checkpoints", 3)
        self.weights = self.settings.pop("weights", Weights(0, 1))
        self.gate: Any = None
        self.learner = ScriptedLearner()
        self.sampler = PickySampler()
        self.registry = CollectorRegistry()
        self.threads = ThreadPoolExecutor()
        self.task: asyncio.Task[None] | None = None

    async def start(self, resume: str = "auto", *, learning: bool = True) -> "Run":
        """A new process: nothing is left of the one before but what is in the run directory."""
        self.learner, self.sampler, self.registry = ScriptedLearner(), PickySampler(), CollectorRegistry()
        self.threads = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(self.threads)
        config = Config(run_dir=self.folder, keep_checkpoints=self.keep, resume_from_ckpt=resume)
        self.loop = LearnLoop(
            self.book.ledger,
            self.learner,
            self.sampler,
            self.weights,
            LearnSettings(**self.settings),
            Checkpoints(self.folder / "checkpoints", self.keep),
            Policies(self.folder / "policies", 6),
            Reporter([JsonLines(self.folder / "metrics.jsonl"), Prometheus(self.registry)]),
            self.gate,
        )
        beginning = where_to_begin(config)
        await self.loop.begin(beginning.checkpoint, own=beginning.own)
        if learning:
            self.learn()
        return self

    def learn(self) -> None:
        self.task = asyncio.create_task(self.loop.run())

    async def kill(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self.task = None
        # Threads do not outlive their process.
        self.threads.shutdown()

    async def close(self) -> None:
        await self.kill()
        self.book.close()

    def judged(self, count: int = 2, version: int | None = None, score: float = 1.0, **given: Any) -> list[int]:
        """Turns that somebody has judged."""
        answered = self.sampler.newest_version if version is None else version
        numbers = []
        for _ in range(count):
            number = self.book.put(State.READY, version=answered, **given)
            assert self.book.change(verdicts.record, number, Verdict(score, Source.LLM), SampleKind.RL, "", 0)
            numbers.append(number)
        return numbers

    def states(self, numbers: list[int]) -> set[State]:
        return {self.book.state(number) for number in numbers}

    def applied(self) -> list[list[int]]:
        """The steps that count, by their turns."""
        steps = self.book.rows("SELECT number, step FROM updates WHERE outcome = 'applied' ORDER BY step")
        assert len({step for _, step in steps}) == len(steps)
        return [
            [turn for (turn,) in self.book.rows(f"SELECT turn FROM update_turns WHERE number = {number} ORDER BY turn")]
            for number, _ in steps
        ]

    def outcomes(self) -> list[str]:
        return [outcome for (outcome,) in self.book.rows("SELECT outcome FROM updates ORDER BY number")]

    @property
    def checkpoints(self) -> list[Checkpoint]:
        return self.loop.line.checkpoints.all()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                assert self.task is None or not self.task.done(), "learning has ended"
                await asyncio.sleep(0.002)

    async def trained(self, *numbers: int) -> None:
        """Wait until turns have been trained on and all that follows from it is done, and see that all agree."""
        try:
            await self.until(lambda: self.states(list(numbers)) <= {State.APPLIED})
        except TimeoutError:
            found = [self.book.read(number) for number in numbers]
            left = {turn.number: (turn.state, turn.reason) for turn in found if turn.state is not State.APPLIED}
            pytest.fail(f"not trained on: {left}; {self.loop.status()}; {self.outcomes()}")
        await self.rest()
        self.check()

    async def make_steps(self, count: int) -> list[list[int]]:
        """One step after the other, each of turns that the policy before it answered; their turns."""
        turns = []
        for _ in range(count):
            turns.append(self.judged())
            await self.trained(*turns[-1])
        return turns

    async def rest(self) -> None:
        """Wait until the learner knows where it is and no step is due."""
        await self.until(lambda: not {"load", "reset"}.isdisjoint(self.learner.calls))
        async with asyncio.timeout(SECONDS):
            while True:
                async with self.loop._busy:
                    if not self.loop._due():
                        return
                await asyncio.sleep(0.002)

    def check(self) -> None:
        """Learner, ledger, sampler and counters are of one mind."""
        applied = self.applied()
        assert self.learner.policy == applied
        assert self.sampler.served[self.sampler.newest_version] == applied
        assert self.loop.step == len(applied)
        assert self.loop.version == self.sampler.newest_version
        turns = [turn for batch in applied for turn in batch]
        assert len(set(turns)) == len(turns), "a turn was trained on twice"
        latest = self.loop.line.checkpoints.latest()
        assert latest is None or read_policy(latest.folder) == applied[: latest.step]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)


@contextlib.asynccontextmanager
async def a_run(folder: Path, **settings: Any) -> AsyncIterator[Run]:
    run = Run(folder, **settings)
    try:
        yield run
    finally:
        await run.close()


@pytest_asyncio.fixture
async def run(tmp_path: Path) -> AsyncIterator[Run]:
    async with a_run(tmp_path / "run") as run:
        yield run


def flat(batches: list[list[int]]) -> list[int]:
    return [turn for batch in batches for turn in batch]


async def forever(*_arguments: Any) -> None:
    await asyncio.Event().wait()


def once(error: Exception) -> Callable[..., None]:
    """A hook that raises the first time."""
    left = [error]

    def hook(*_arguments: Any) -> None:
        if left:
            raise left.pop()

    return hook


def dies(times: int = 1, when: Callable[[list[int]], bool] = lambda turns: True) -> Callable[..., None]:
    """A hook for `step` that takes the learner down so often, with batches of that kind."""
    left = [None] * times

    def hook(sequences: Any) -> None:
        if left and when([span.turn for sequence in sequences for span in sequence.spans]):
            left.pop()
            raise EngineUnavailable("The learner's process ended.")

    return hook


# batches


async def test_a_step_takes_as_many_turns_as_a_batch_has_the_longest_judged_first(run: Run) -> None:
    await run.start()
    first, second, third = run.judged(3)
    await run.trained(first, second)
    assert run.states([third]) == {State.JUDGED}
    assert run.loop.status() == "1 of the 2 judged turns that a step needs (--batch-size)"
    (fourth,) = run.judged(1)
    await run.trained(third, fourth)
    assert run.learner.policy == [[first, second], [third, fourth]]
    assert run.sampler.newest_version == 2


async def test_what_was_judged_before_the_start_is_trained_on(run: Run) -> None:
    turns = run.judged(4, version=0)
    await run.start()
    await run.trained(*turns)


async def test_a_smaller_batch_is_trained_on_after_the_batch_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if nothing else happens that would wake anybody."""
    monkeypatch.setattr(module, "IDLE_SECONDS", 10 * SECONDS)
    async with a_run(tmp_path / "run", batch_size=4, batch_timeout=0.1) as run:
        await run.start()
        turns = run.judged(3)
        await run.trained(*turns)
        assert run.learner.policy == [turns]


async def test_turns_without_a_gradient_never_count_towards_a_batch(run: Run) -> None:
    """Mistake 9. A neutral one is dropped when it is judged; one that this method cannot use when it is claimed."""
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
    async with a_run(tmp_path / "run", weights=CENTRED) as run:
        await run.start()
        alike = run.judged(2, score=-1.0)
        await run.until(lambda: run.states(alike) == {State.DROPPED})
        await run.rest()
        assert run.book.read(alike[0]).reason == "no signal: its whole batch was judged alike (--baseline batch)"
        assert "step" not in run.learner.calls
        assert run.outcomes() == []
        different = [*run.judged(1, score=1.0), *run.judged(1, score=-1.0)]
        await run.trained(*different)
        assert run.learner.policy == [different]


async def test_a_batch_of_one_after_the_batch_timeout_is_measured_from_nothing(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", weights=CENTRED, batch_timeout=0.01) as run:
        seen: list[float] = []
        await run.start()
        run.learner.hooks["step"] = lambda sequences: seen.extend(sequences[0].spans[0].advantages)
        await run.trained(*run.judged(1, score=-1.0))
        assert set(seen) == {-1.0}


async def test_a_locked_ledger_loses_no_turn_of_a_batch_that_was_judged_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is dropped or waits on, and none is left claimed."""
    async with a_run(tmp_path / "run", weights=CENTRED) as run:
        await run.start()
        calls: list[int] = []
        drop = run.book.ledger.drop

        async def locked(turn: int, reason: str) -> None:
            calls.append(turn)
            if len(calls) == 2:
                raise module.LedgerError("database is locked")
            await drop(turn, reason)

        monkeypatch.setattr(run.book.ledger, "drop", locked)
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


async def test_a_turn_that_is_forgotten_during_its_step_is_not_learned_from(run: Run) -> None:
    await run.start()

    def forget(_sequences: Any) -> None:
        del run.learner.hooks["step"]
        session = run.book.scalar("SELECT session FROM turns WHERE number = ?", forgotten)
        run.book.change(changes.forget, [session])

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
            run.book.change(changes.forget, [run.book.scalar("SELECT session FROM turns WHERE number = ?", forgotten)])

        run.learner.hooks["step"] = forget
        (forgotten,) = run.judged(1, session="secret")
        rest = run.judged(2)
        await run.trained(*before, *rest)
        assert run.outcomes() == ["applied", "applied"]


# refusals


async def test_a_refused_steps_batch_is_set_aside_and_listed_and_learning_goes_on(run: Run) -> None:
    await run.start()
    run.learner.hooks["step"] = once(StepRefused("the gradient is not finite"))
    bad = run.judged()
    await run.until(lambda: run.states(bad) == {State.DROPPED})
    await run.trained(*run.judged())
    assert run.sampler.newest_version == 1
    assert run.book.read(bad[0]).reason == "quarantined: the gradient is not finite"
    (listed,) = read_status(run.book.db, None, {}).as_json()["quarantined"]
    assert (listed["step"], listed["turns"], listed["reason"]) == (1, tuple(bad), "the gradient is not finite")


async def test_a_policy_that_fails_the_gate_is_not_promoted_and_its_step_is_undone(run: Run) -> None:
    run.gate = Examiner(lambda version: {0: 0.9, 1: 0.79, 2: 0.81, 3: 0.7}[version])
    await run.start()
    bad = run.judged()
    await run.until(lambda: run.states(bad) == {State.DROPPED})
    assert run.sampler.newest_version == 0
    assert run.sampler.served.keys() == {0}
    assert run.learner.policy == []
    assert "gate" in run.book.read(bad[0]).reason
    good = run.judged()
    await run.trained(*good)
    assert run.sampler.newest_version == 2
    # From now on it is the policy that serves which is to be equalled.
    worse = run.judged()
    await run.until(lambda: run.states(worse) == {State.DROPPED})
    await run.rest()
    run.check()
    assert run.gate.examined == [0, 1, 2, 3]


async def test_policies_that_fail_the_gate_take_no_place_from_the_one_that_serves(run: Run) -> None:
    run.gate = Examiner(lambda version: 1.0 if version <= 1 else 0.0)
    await run.start()
    await run.trained(*run.judged())
    for _ in range(run.loop.line.policies.keep + 1):
        bad = run.judged()
        await run.until(lambda turns=bad: run.states(turns) == {State.DROPPED})
    assert run.sampler.newest_version == 1
    assert [folder.name for folder in (run.folder / "policies").iterdir()] == ["v000001"]


@pytest.mark.parametrize("error", [QueueFull(7), EngineUnavailable("The worker died.")])
async def test_a_gate_that_cannot_be_asked_costs_no_turn(run: Run, error: Exception) -> None:
    """A busy server refuses the examination's questions like anybody's."""
    asked = once(error)
    run.gate = Examiner(lambda version: asked() or 1.0)
    await run.start()
    await run.trained(*run.judged())
    assert run.outcomes() == ["applied"]


# the learner, the sampler and the disk fail


async def test_a_learner_that_dies_is_brought_back_to_the_checkpoint_and_no_turn_is_lost_or_doubled(run: Run) -> None:
    await run.start()
    turns = [run.judged() for _ in range(3)]
    await run.trained(*flat(turns))
    assert [checkpoint.step for checkpoint in run.checkpoints] == [2]
    run.learner.hooks["step"] = dies()
    turns.append(run.judged())
    await run.trained(*flat(turns))
    # The third step was not in the checkpoint, and is made again.
    assert run.learner.policy == turns
    assert run.outcomes() == ["applied", "applied", "undone", "applied", "applied"]
    assert run.loop.trouble == ""


async def test_a_batch_that_kills_the_learner_twice_is_set_aside(tmp_path: Path) -> None:
    """Also if steps that were lost with the learner have to be made again in between."""
    async with a_run(tmp_path / "run", save_interval=10) as run:
        await run.start()
        good = [run.judged(), run.judged()]
        await run.trained(*flat(good))
        deadly = run.judged()
        run.learner.hooks["step"] = dies(100, lambda turns: deadly[0] in turns)
        await run.until(lambda: run.states(deadly) == {State.DROPPED})
        assert "died" in run.book.read(deadly[0]).reason
        more = run.judged()
        await run.trained(*flat(good), *more)
        assert run.learner.policy == [*good, more]
        assert run.learner.calls.count("start") == 3


async def test_a_sampler_that_fails_is_not_the_batchs_fault(run: Run) -> None:
    await run.start()
    left = [EngineUnavailable("The worker died.")] * 5

    def fail(_version: int) -> None:
        if left:
            raise left.pop()

    run.sampler.hook = fail
    await run.trained(*run.judged())
    assert not left
    assert "quarantined" not in run.outcomes()


@pytest.mark.parametrize("error", [StepRefused("disk: No space left on device"), EngineUnavailable("It died.")])
async def test_a_policy_that_cannot_be_written_is_not_the_batchs_fault(run: Run, error: Exception) -> None:
    """And what the learner has made meanwhile is not kept behind the ledger's back."""
    await run.start()
    left = [error] * 3

    def fail(_folder: Path) -> None:
        if left:
            raise left.pop()

    run.learner.hooks["write_policy"] = fail
    turns = [run.judged(), run.judged()]
    await run.trained(*flat(turns))
    assert run.learner.policy == turns
    assert "quarantined" not in run.outcomes()


@pytest.mark.parametrize("error", [StepRefused("disk: No space left on device"), OSError(28, "No space left")])
async def test_a_checkpoint_that_cannot_be_written_costs_no_learning(
    run: Run, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    await run.start()

    def fail(_folder: Path) -> None:
        raise error

    run.learner.hooks["save"] = fail
    turns = [run.judged() for _ in range(3)]
    await run.trained(*flat(turns))
    assert run.outcomes() == ["applied"] * 3
    assert run.checkpoints == []
    assert "No space left" in caplog.text
    # The next chance is taken, and holds all that was not in a checkpoint.
    del run.learner.hooks["save"]
    turns.append(run.judged())
    await run.trained(*turns[-1])
    (checkpoint,) = run.checkpoints
    assert [list(batch.turns) for batch in checkpoint.batches] == turns


async def test_a_ledger_that_cannot_be_written_costs_no_turn(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    await run.start()
    apply = run.book.ledger.apply_step
    left = [module.LedgerError("database is locked")] * 2

    async def fail(*arguments: Any) -> None:
        if left:
            raise left.pop()
        await apply(*arguments)

    monkeypatch.setattr(run.book.ledger, "apply_step", fail)
    await run.trained(*run.judged())


@pytest.mark.parametrize("call", ["claim", "apply_step"])
async def test_a_locked_ledger_costs_no_step_that_was_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    async with a_run(tmp_path / "run", save_interval=100) as run:
        await run.start()
        turns = [run.judged()]
        await run.trained(*turns[0])
        real, fail = getattr(run.book.ledger, call), once(module.LedgerError("database is locked"))

        async def locked(*arguments: Any) -> Any:
            fail()
            return await real(*arguments)

        monkeypatch.setattr(run.book.ledger, call, locked)
        turns.append(run.judged())
        await run.trained(*flat(turns))
        assert run.outcomes() == ["applied", "applied"]
        assert run.learner.calls.count("reset") == 1


async def test_a_sampler_that_fails_costs_no_step_that_was_made(tmp_path: Path) -> None:
    async with a_run(tmp_path / "run", save_interval=100) as run:
        await run.start()
        turns = [run.judged()]
        await run.trained(*turns[0])
        run.sampler.hook = once(EngineUnavailable("The worker died."))
        turns.append(run.judged())
        await run.trained(*flat(turns))
        assert run.outcomes() == ["applied", "applied"]
        assert run.learner.policy == turns


async def test_steps_that_are_lost_with_a_learner_are_made_again_of_all_their_turns(tmp_path: Path) -> None:
    """However many there were: the turns do not become stale by it."""
    async with a_run(tmp_path / "run", save_interval=100, max_staleness=2) as run:
        await run.start()
        turns = await run.make_steps(7)
        run.learner.hooks["step"] = dies()
        turns.append(run.judged())
        await run.trained(*flat(turns))
        assert run.learner.policy == turns


async def test_while_nothing_can_be_trained_the_status_says_why(run: Run) -> None:
    await run.start(learning=False)

    def broken() -> None:
        raise EngineUnavailable("The model's folder is gone.")

    run.learner.hooks["start"] = broken
    run.learn()
    await run.until(lambda: run.loop.status() == "suspended: The model's folder is gone.")
    run.learner.hooks.clear()
    await run.trained(*run.judged())
    assert "suspended" not in run.loop.status()


# the end of a server


async def test_finishing_saves_what_no_checkpoint_has(run: Run) -> None:
    await run.start()
    turns = run.judged()
    await run.trained(*turns)
    assert run.checkpoints == []
    await Loops(None, run.loop, 5.0).stop()
    assert [checkpoint.step for checkpoint in run.checkpoints] == [1]
    await run.kill()
    await run.start()
    await run.trained(*turns)
    assert run.outcomes() == ["applied"]


async def test_finishing_lets_a_step_end_and_begins_no_other(run: Run) -> None:
    await run.start()
    go = asyncio.Event()
    run.learner.hooks["step"] = lambda _sequences: go.wait()
    turns = [run.judged(), run.judged()]
    await run.until(lambda: "step" in run.learner.calls)
    assert run.loop.status() == "training step 1"
    finishing = asyncio.create_task(run.loop.finish())
    await asyncio.sleep(0.01)
    go.set()
    await finishing
    assert run.applied() == turns[:1]
    assert [checkpoint.step for checkpoint in run.checkpoints] == [1]
    await run.kill()
    assert run.applied() == turns[:1]
    await run.start()
    await run.trained(*flat(turns))


async def test_finishing_after_the_learner_has_died_does_not_save_an_empty_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 10 * SECONDS)
    async with a_run(tmp_path / "run", save_interval=10) as run:
        await run.start()
        turns = [run.judged()]
        await run.trained(*turns[0])
        run.learner.hooks["step"] = dies()
        turns.append(run.judged())
        await run.until(lambda: bool(run.loop.trouble))
        await Loops(None, run.loop, 5.0).stop()
        await run.kill()
        await run.start()
        await run.trained(*flat(turns))
        assert run.learner.policy == turns


async def test_finishing_after_it_died_while_nobody_could_go_back_does_not_save_an_empty_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 10 * SECONDS)
    async with a_run(tmp_path / "run") as run:
        await run.start()
        turns = [run.judged() for _ in range(3)]
        await run.trained(*flat(turns))

        async def die(_sequences: Any) -> None:
            run.sampler.hook = once(EngineUnavailable("The worker died."))
            with contextlib.suppress(EngineUnavailable):
                await run.loop.roll_back(run.checkpoints[0])
            raise EngineUnavailable("The learner's process ended.")

        run.learner.hooks["step"] = die
        turns.append(run.judged())
        await run.until(lambda: run.loop._astray and not run.loop._training)
        await run.loop.finish()
        await run.kill()
        await run.start()
        await run.trained(*flat(turns))
        assert run.learner.policy == turns


# resuming


@pytest.mark.parametrize("call", ["step", "write_policy", "publish", "apply", "save", "saved"])
@pytest.mark.parametrize("steps", [0, 1, 2, 3])
async def test_killed_at_any_point_of_a_step_every_turn_is_trained_on_once(
    run: Run, call: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.start()
    turns = [run.judged() for _ in range(steps)]
    await run.trained(*flat(turns))
    reached = asyncio.Event()

    async def hang(*_arguments: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    apply = run.book.ledger.apply_step
    if call == "publish":
        run.sampler.hook = hang
    elif call == "apply":
        monkeypatch.setattr(run.book.ledger, "apply_step", hang)
    elif call == "saved":
        monkeypatch.setattr(run.loop.reporter, "write", lambda report: reached.set())
    else:
        run.learner.hooks[call] = hang
    turns.append(run.judged())
    if call == "save":
        turns.append(run.judged())
    async with asyncio.timeout(SECONDS):
        await reached.wait()
    await run.kill()
    monkeypatch.setattr(run.book.ledger, "apply_step", apply)
    await run.start()
    await run.trained(*flat(turns))
    assert run.learner.policy == turns


async def test_resuming_serves_the_checkpoints_policy_before_anything_is_learned(run: Run) -> None:
    await run.start()
    turns = run.judged(6)
    await run.trained(*turns)
    await run.kill()
    await run.start(learning=False)
    assert run.sampler.newest_version == 2
    assert run.sampler.served[2] == run.applied() == [turns[:2], turns[2:4]]
    assert run.learner.calls == []
    assert run.states(turns[4:]) == {State.JUDGED}


async def test_many_steps_that_were_lost_are_made_again_without_losing_a_turn(tmp_path: Path) -> None:
    """Turns that were fresh when they were trained on are not stale because the steps are made again."""
    async with a_run(tmp_path / "run", save_interval=100, max_staleness=2) as run:
        await run.start()
        turns = await run.make_steps(7)
        waiting = run.judged(1)
        await run.kill()
        await run.start()
        await run.until(lambda: run.states(flat(turns)) <= {State.APPLIED, State.DROPPED})
        await run.trained(*flat(turns))
        turns.append([*waiting, *run.judged(1)])
        await run.trained(*turns[-1])
        assert run.learner.policy == turns


async def test_a_damaged_checkpoint_is_named_and_its_steps_are_made_again(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    await run.start()
    turns = [run.judged() for _ in range(4)]
    await run.trained(*flat(turns))
    await run.kill()
    damaged = run.checkpoints[-1]
    (damaged.folder / "adapter_model.safetensors").write_text("[]")
    await run.start()
    assert damaged.folder.name in caplog.text
    await run.trained(*flat(turns))
    assert run.outcomes().count("applied") == 4


async def test_beginning_anew_keeps_what_was_trained_trained(run: Run) -> None:
    await run.start()
    old = [run.judged() for _ in range(3)]
    await run.trained(*flat(old))
    await run.kill()
    await run.start("none", learning=False)
    assert run.sampler.newest_version == 0
    run.learn()
    new = run.judged()
    await run.until(lambda: run.states(new) == {State.APPLIED})
    await run.rest()
    assert run.learner.policy == [new]
    assert run.sampler.served[run.sampler.newest_version] == [new]
    # And a start that goes on goes on from here.
    policy = run.learner.policy
    await run.kill()
    await run.start()
    more = run.judged()
    await run.until(lambda: run.states(more) == {State.APPLIED})
    await run.rest()
    assert run.learner.policy == [*policy, more]
    assert run.applied() == [*old, *policy, more]


async def test_beginning_anew_is_remembered_also_if_nothing_had_been_saved(run: Run) -> None:
    await run.start()
    old = run.judged()
    await run.trained(*old)
    await run.kill()
    assert run.checkpoints == []
    await run.start("none")
    await run.until(lambda: "reset" in run.learner.calls)
    await run.rest()
    await run.kill()
    await run.start()
    new = run.judged()
    await run.until(lambda: run.states(new) == {State.APPLIED})
    await run.rest()
    assert run.learner.policy == [new]
    assert run.applied() == [old, new]


async def test_another_runs_checkpoint_gives_its_weights_and_nothing_else(tmp_path: Path) -> None:
    async with a_run(tmp_path / "other") as other:
        await other.start()
        learned = [other.judged(), other.judged()]
        await other.trained(*flat(learned))
        folder = str(other.checkpoints[-1].folder)
    async with a_run(tmp_path / "run") as run:
        await run.start(folder, learning=False)
        assert run.sampler.served[run.sampler.newest_version] == learned
        run.learn()
        turns = run.judged()
        await run.until(lambda: run.states(turns) == {State.APPLIED})
        await run.rest()
        assert run.learner.policy == [*learned, turns]
        assert run.applied() == [turns]
        await run.kill()
        # Without the folder the run goes on by itself.
        await run.start()
        more = run.judged()
        await run.until(lambda: run.states(more) == {State.APPLIED})
        await run.rest()
        assert run.learner.policy == [*learned, turns, more]


async def test_an_earlier_checkpoint_of_the_run_is_gone_on_from_and_stays_the_one_that_counts(run: Run) -> None:
    await run.start()
    turns = [run.judged() for _ in range(4)]
    await run.trained(*flat(turns))
    earlier = run.checkpoints[0]
    assert earlier.step == 2
    await run.kill()
    # The same turns in other batches: those of the two ways may not be mixed up.
    run.settings |= {"batch_size": 1, "max_steps": 3}
    await run.start(str(earlier.folder), learning=False)
    run.learner.hooks["step"] = once(StepRefused("not this one"))
    run.learn()
    await run.until(lambda: run.loop.step == 3)
    await run.kill()
    (aside,) = (turn for turn in flat(turns) if run.book.state(turn) is State.DROPPED)
    run.settings["max_steps"] = 1000
    await run.start()
    await run.until(lambda: State.JUDGED not in run.states(flat(turns)))
    await run.rest()
    run.check()
    assert sorted(flat(run.learner.policy)) == sorted(set(flat(turns)) - {aside})


async def test_a_policy_version_is_never_used_for_two_policies(run: Run) -> None:
    """Numbers that only a checkpoint or only a turn knows of count too."""
    seen: dict[int, list[list[int]]] = {}

    def look() -> None:
        for version, policy in run.sampler.served.items():
            assert seen.setdefault(version, policy) == policy

    for resume in ("auto", "auto", "none", "auto"):
        await run.start(resume)
        for _ in range(3):
            await run.until(lambda: bool(run.learner.calls))
            turns = run.judged()
            await run.until(lambda turns=turns: run.states(turns) == {State.APPLIED})
            await run.rest()
        look()
        await run.loop.roll_back(run.checkpoints[0])
        look()
        await run.kill()
    versions = [checkpoint.version for checkpoint in run.checkpoints]
    assert len(set(versions)) == len(versions)


# going back


async def test_going_back_serves_the_earlier_policy_at_once_and_learns_on_from_it(run: Run) -> None:
    await run.start()
    turns = [run.judged() for _ in range(5)]
    await run.trained(*flat(turns))
    version = await run.loop.roll_back(run.checkpoints[0])
    assert run.sampler.newest_version == version == 6
    run.check()
    assert run.learner.policy == turns[:2]
    # What came after is neither forgotten nor trained on again.
    assert run.states(flat(turns)) == {State.APPLIED}
    assert run.outcomes() == ["applied", "applied", "rolled_back", "rolled_back", "rolled_back"]
    more = run.judged()
    await run.trained(*more)
    assert run.learner.policy == [*turns[:2], more]
    await run.kill()
    await run.start()
    await run.trained(*run.judged())
    assert run.learner.policy[:3] == [*turns[:2], more]


@pytest.mark.parametrize("call", ["step", "write_policy", "publish"])
async def test_going_back_while_a_step_is_under_way_leaves_that_step_behind(run: Run, call: str) -> None:
    await run.start()
    turns = [run.judged() for _ in range(4)]
    await run.trained(*flat(turns))
    reached, go = asyncio.Event(), asyncio.Event()

    async def hold(argument: Any) -> None:
        reached.set()
        await go.wait()

    if call == "publish":
        run.sampler.hook = lambda version: hold(version) if version == 5 else None
    else:
        run.learner.hooks[call] = hold
    under_way = run.judged()
    await reached.wait()
    going_back = asyncio.create_task(run.loop.roll_back(run.checkpoints[0]))
    # It serves before the step has ended.
    await run.until(lambda: run.sampler.newest_version > 4)
    assert run.sampler.served[run.sampler.newest_version] == turns[:2]
    run.learner.hooks.clear()
    go.set()
    await going_back
    await run.until(lambda: run.states(under_way) == {State.APPLIED})
    await run.rest()
    run.check()
    # The step's turns are learned from where learning goes on.
    assert run.learner.policy == [*turns[:2], under_way]
    assert "quarantined" not in run.outcomes()
    assert run.loop.trouble == ""


@pytest.mark.parametrize("error", [EngineUnavailable("It died."), StepRefused("the checkpoint cannot be loaded")])
async def test_going_back_that_fails_does_not_leave_the_learner_with_nothing(run: Run, error: Exception) -> None:
    await run.start()
    turns = [run.judged() for _ in range(3)]
    await run.trained(*flat(turns))
    run.learner.hooks["load"] = once(error)
    with pytest.raises(type(error)):
        await run.loop.roll_back(run.checkpoints[0])
    turns.append(run.judged())
    await run.trained(*flat(turns))
    assert run.learner.policy == turns


@pytest.mark.parametrize(
    ("call", "steps"), [("load", 2), ("save", 2), ("ledger", 2), ("reset", 0), ("save", 0), ("ledger", 0)]
)
async def test_killed_while_going_back_it_either_happened_or_it_did_not(
    run: Run, call: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.start()
    turns = [run.judged() for _ in range(6)]
    await run.trained(*flat(turns))
    earlier = run.checkpoints[0]
    assert earlier.step == 2
    reached = asyncio.Event()

    async def hang(*_arguments: Any) -> None:
        reached.set()
        await asyncio.Event().wait()

    roll_back = run.book.ledger.roll_back
    if call == "ledger":
        monkeypatch.setattr(run.book.ledger, "roll_back", hang)
    else:
        run.learner.hooks[call] = hang
    going_back = asyncio.create_task(run.loop.roll_back(earlier if steps else None))
    await reached.wait()
    going_back.cancel()
    await run.kill()
    monkeypatch.setattr(run.book.ledger, "roll_back", roll_back)
    await run.start()
    more = run.judged()
    await run.trained(*more)
    # Either all six steps count, or those gone back to and no turn of the others is trained on again.
    assert run.learner.policy in ([*turns, more], [*turns[:steps], more])
    assert run.states(flat(turns)) == {State.APPLIED}


async def test_going_back_again_goes_further_back_until_nothing_is_left(run: Run) -> None:
    await run.start()
    turns = [run.judged() for _ in range(7)]
    await run.trained(*flat(turns))
    loops = Loops(None, run.loop, 5.0)
    for step in (6, 4, 2):
        await loops.roll_back(None)
        await run.rest()
        run.check()
        assert run.learner.policy == turns[:step]
        assert {checkpoint.step for checkpoint in run.checkpoints} == {2, 4, 6}
    version = await loops.roll_back(None)
    assert run.sampler.served[version] == run.learner.policy == []
    assert run.sampler.newest_version == version
    run.check()
    with pytest.raises(OperationFailed, match="Nothing has been learned"):
        await loops.roll_back(None)


async def test_before_the_first_checkpoint_the_base_model_is_gone_back_to(run: Run) -> None:
    await run.start()
    turns = run.judged()
    await run.trained(*turns)
    assert await Loops(None, run.loop, 5.0).roll_back(None) == 2
    assert run.sampler.served[run.sampler.newest_version] == []
    assert run.outcomes() == ["rolled_back"]
    # What was learned is neither learned again nor forgotten, now and after a restart.
    more = run.judged()
    await run.trained(*more)
    await run.kill()
    await run.start()
    again = run.judged()
    await run.trained(*again)
    assert run.learner.policy == [more, again]
    assert run.states(turns) == {State.APPLIED}


@pytest.mark.parametrize("call", ["reset", "write_policy", "publish"])
async def test_going_back_to_the_base_model_that_fails_changes_nothing(run: Run, call: str) -> None:
    await run.start()
    turns = [run.judged() for _ in range(2)]
    await run.trained(*flat(turns))
    error = EngineUnavailable("It died.")
    if call == "publish":
        run.sampler.hook = once(error)
    else:
        run.learner.hooks[call] = once(error)
    with pytest.raises(EngineUnavailable, match="It died"):
        await run.loop.roll_back(None)
    assert (run.loop.step, run.loop.version) == (2, 2)
    assert run.sampler.served[run.loop.version] == turns
    turns.append(run.judged())
    await run.trained(*flat(turns))
    assert run.learner.policy == turns


async def test_the_base_model_can_be_asked_for(run: Run) -> None:
    await run.start()
    turns = [run.judged() for _ in range(4)]
    await run.trained(*flat(turns))
    last = run.checkpoints[-1]
    loops = Loops(None, run.loop, 5.0)
    await loops.roll_back(0)
    assert run.learner.policy == []
    # And what was left can be come back to.
    version = await loops.roll_back(last.version)
    assert run.sampler.served[version] == run.learner.policy == turns


# reports


async def test_a_step_is_reported_in_the_log_in_a_file_and_to_prometheus(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    await run.start()
    run.judged(1)
    turns = run.judged(1, score=-1.0)
    await run.trained(*turns)
    (line,) = [message for message in caplog.messages if message.startswith("step 1:")]
    for part in ("2 samples (0 opd+rl, 0 opd, 2 rl)", "reward +0.00", "KL 0.0100", "clipped 12.5%", "policy 1 serves"):
        assert part in line
    (row,) = [json.loads(text) for text in (run.folder / "metrics.jsonl").read_text().splitlines()]
    expected = {"step": 1, "version": 1, "samples": 2, "rl": 2, "opd": 0, "opd_rl": 0, "reward": 0.0, "staleness": 0.0}
    assert {name: row[name] for name in expected} == expected
    assert row["kl_old"] == 0.01
    assert row["latency_seconds"] >= 0
    assert json.loads(run.book.scalar("SELECT metrics FROM updates"))["step"] == 1
    told = generate_latest(run.registry).decode()
    assert 'openclaw_trained_samples_total{kind="rl"} 2.0' in told
    assert "openclaw_step_version 1.0" in told


async def test_a_sink_that_fails_is_said_once_and_stops_nothing(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    (run.folder / "metrics.jsonl").mkdir()
    await run.start()
    turns = run.judged(6)
    await run.trained(*turns)
    assert sum("JsonLines" in message for message in caplog.messages) == 1
    assert "openclaw_step_version 3.0" in generate_latest(run.registry).decode()


# everything at once


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_breaks_whenever_every_turn_is_trained_on_once(tmp_path: Path, seed: int) -> None:
    """Random deaths of the learner, of the sampler's publishing, of the disk and of the whole server."""
    draw = random.Random(seed)
    async with a_run(tmp_path / "run", save_interval=draw.choice([1, 3]), max_staleness=1000) as run:
        turns: list[int] = []

        def trouble(*_arguments: Any) -> Any:
            roll = draw.random()
            if roll < 0.08:
                raise EngineUnavailable("It died.")
            if roll < 0.12:
                raise OSError(28, "No space left on device")
            return forever() if roll < 0.17 else None

        for _ in range(8):
            await run.start()
            for name in ("write_policy", "save", "load", "start", "undo"):
                run.learner.hooks[name] = trouble
            run.sampler.hook = trouble
            for _ in range(draw.randint(1, 4)):
                turns += run.judged(draw.randint(1, 3))
                await asyncio.sleep(draw.uniform(0, 0.03))
            await run.kill()
        await run.start()
        turns += run.judged(2 if len(turns) % 2 == 0 else 1)
        await run.trained(*turns)
        assert sorted(flat(run.learner.policy)) == sorted(turns)
