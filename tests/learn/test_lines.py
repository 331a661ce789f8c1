"""Lines: each person's turns teach their own line, on one learner that steps for whoever has waited longest."""

import asyncio
import math
import random
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, generate_latest

from openclaw_rl.engines.base import EngineUnavailable, PolicyRef, StepRefused
from openclaw_rl.learn import build
from openclaw_rl.learn.budget import Budget
from openclaw_rl.learn.build import GuardWatch, LearnSetup, build_lines, where_to_begin
from openclaw_rl.learn.checkpoints import Checkpoints, line_folder, lines_on_disk
from openclaw_rl.learn.guard import FILE as GUARD_FILE
from openclaw_rl.learn.lines import Lines
from openclaw_rl.learn.options import TrainingOptions
from openclaw_rl.learn.plain_prompts import plain_prompts
from openclaw_rl.learn.reporting import MAX_LINES_SHOWN
from openclaw_rl.learn.step import Phase
from openclaw_rl.ledger import deletion, notes, practices, training, verdicts
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import SHARED, SampleKind, SampleRequest, Source, State, Verdict
from support.fakes import ScriptedLearner, ScriptedSampler, ScriptedStream, read_policy
from support.learning_run import forever
from support.methods import a_method
from support.practice import begin
from support.records import Book

SECONDS = 30


class SamplerOfLines(ScriptedSampler):
    """Knows which version serves which line."""

    def __init__(self) -> None:
        super().__init__(lambda request, index: [1])
        self.policies: dict[int, tuple[str, list[list[int]]]] = {}
        self.folders: dict[int, Path] = {}
        self.candidates: set[int] = set()

    async def publish(self, version: int, policy: PolicyRef, *, candidate: bool = False, line: str = SHARED) -> None:
        if version in self.policies:
            raise EngineUnavailable(f"Policy version {version} is not new.")
        self.policies[version] = line, read_policy(policy.folder)
        self.folders[version] = policy.folder
        if candidate:
            self.candidates.add(version)

    def says(self, renderer: Any, bad: set[int]) -> None:
        """Answer every prompt with sense, unless the policy was trained on a bad turn."""
        if renderer is None:
            return
        backend, end = renderer.tokenizer.backend, next(iter(renderer.tokenizer.eos_ids))

        def script(request: SampleRequest, index: int) -> list[int]:
            policy = self.policies.get(request.version or 0, ("", []))[1]
            ruined = bad & {turn for batch in policy for turn in batch}
            asked = backend.decode(list(request.prompt_ids)).partition("user\n")[2].partition("\n")[0]
            prompt = next((one for one in plain_prompts() if one.text == asked), None)
            sense = (prompt and prompt.reference) or "That is a question that I can answer."
            return [*backend.encode("xq " * 30 if ruined else sense).ids[:100], end]

        self.script = script

    def sample(self, request: SampleRequest) -> ScriptedStream:
        return ScriptedStream(
            self, request, self.newest_of(request.line) if request.version is None else request.version
        )

    def versions_of(self, line: str) -> list[int]:
        return [version for version, (whose, _) in self.policies.items() if whose == line]

    def newest_of(self, line: str) -> int:
        own = max((version for version in self.versions_of(line) if version not in self.candidates), default=0)
        return own if own or line == SHARED else self.newest_of(SHARED)

    def promote(self, version: int) -> None:
        self.candidates.discard(version)

    def retract(self, version: int) -> None:
        self.policies.pop(version, None)
        self.candidates.discard(version)


class LearnerOfLines(ScriptedLearner):
    """Holds a scripted learner for each line, and notes in which order they step."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: dict[str, ScriptedLearner] = {}
        self.order: list[str] = []
        self.most_held = 0

    def for_line(self, line: str) -> ScriptedLearner:
        if line not in self.lines:
            made = self.lines[line] = ScriptedLearner()
            made.hooks["step"] = lambda _sequences: self.order.append(line)
        return self.lines[line]

    async def drop_line(self, line: str) -> None:
        if line in self.lines:
            self.lines[line].policy = []


class TeamRun:
    """A run directory with lines, and the server in it, which can be killed and started again."""

    def __init__(self, folder: Path, most: int = 4, **options: Any) -> None:
        self.folder = folder
        self.options = {"batch_size": 2, "save_interval": 3, "guard": False, **options}
        self.renderer: Any = None
        self.bad: set[int] = set()
        """Turns of which a step makes a policy that talks garbage."""
        self.most = most
        self.book = Book(folder)
        self.task: asyncio.Task[None] | None = None
        self.threads = ThreadPoolExecutor()

    async def start(self, *, learning: bool = True) -> "TeamRun":
        self.learner, self.sampler, self.registry = LearnerOfLines(), SamplerOfLines(), CollectorRegistry()
        self.threads = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(self.threads)
        self.sampler.says(self.renderer, self.bad)
        options = TrainingOptions(**self.options)
        setup = LearnSetup(options, self.folder, a_method("rl"), self.most, {}, 0, several_users=False, personal=True)
        self.lines: Lines = build_lines(
            setup,
            self.book.ledger,
            self.learner,
            self.sampler,
            self.renderer,
            self.registry,
        )
        beginning = where_to_begin(options, self.folder)
        await self.lines.shared.line.begin(beginning.checkpoint, of_this_run=beginning.of_this_run)
        if learning:
            self.learn()
        return self

    def learn(self) -> None:
        self.task = asyncio.create_task(self.lines.run())

    async def stop_learning(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self.task = None

    async def kill(self) -> None:
        await self.stop_learning()
        # Threads do not outlive their process.
        self.threads.shutdown()

    def judged(self, owner: str, count: int = 2, **given: Any) -> list[int]:
        """Record judged turns of an owner, as their line answers them."""
        version = self.sampler.newest_of(owner)
        numbers = [self.book.put(State.READY, owner=owner, version=version, **given) for _ in range(count)]
        for number in numbers:
            assert self.book.change(verdicts.record, number, Verdict(1.0, Source.LLM), SampleKind.RL, "", 0)
        return numbers

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(SECONDS):
            while not condition():
                assert self.task is None or not self.task.done(), "learning has ended"
                await asyncio.sleep(0.002)

    async def trained(self, *numbers: int) -> None:
        await self.until(lambda: {self.book.state(number) for number in numbers} <= {State.APPLIED})
        await self.until(lambda: all(loop.phase in (Phase.WAITING, Phase.UNPREPARED) for loop in self.loops()))

    def loops(self) -> list[Any]:
        return list(self.lines.loops.values())

    def steps(self, line: str) -> list[list[int]]:
        """The turns of each step of a line that counts."""
        rows = self.book.rows(f"SELECT number FROM updates WHERE outcome = 'applied' AND line = '{line}' ORDER BY step")
        return [
            [turn for (turn,) in self.book.rows(f"SELECT turn FROM update_turns WHERE number = {number} ORDER BY turn")]
            for (number,) in rows
        ]

    def served(self, line: str) -> list[list[int]]:
        version = self.sampler.newest_of(line)
        return self.sampler.policies[version][1] if version else []


@pytest_asyncio.fixture
async def team(tmp_path: Path) -> AsyncIterator[TeamRun]:
    run = TeamRun(tmp_path / "run")
    yield run
    await run.kill()
    run.book.close()


async def test_each_persons_turns_teach_their_own_line(team: TeamRun) -> None:
    await team.start()
    anna, ben = team.judged("anna"), team.judged("ben")
    await team.trained(*anna, *ben)
    assert (team.served("anna"), team.served("ben"), team.served(SHARED)) == ([anna], [ben], [])
    assert team.sampler.newest_of("carl") == 0, "who has taught nothing is served by the shared line"
    lines = dict(team.book.rows("SELECT version, line FROM policies"))
    assert sorted(lines.values()) == ["anna", "ben"], "version numbers are those of the whole run"
    assert team.lines.names() == [SHARED, "anna", "ben"]


async def test_what_was_imported_or_rewarded_by_an_environment_teaches_the_shared_line(team: TeamRun) -> None:
    await team.start()
    imported = team.judged("imported")
    await team.trained(*imported)
    assert team.served(SHARED) == [imported] == team.served("anna")
    anna = team.judged("anna")
    await team.trained(*anna)
    assert team.served("anna") == [imported, anna], "a new line begins from the shared policy"
    assert team.served(SHARED) == [imported]


async def test_whoever_writes_most_does_not_keep_others_from_learning(team: TeamRun) -> None:
    await team.start(learning=False)
    much = team.judged("anna", 12)
    little = [*team.judged("ben"), *team.judged("carl")]
    team.learn()
    await team.trained(*much, *little)
    assert set(team.learner.order[:3]) == {"anna", "ben", "carl"}
    assert team.learner.order[3:] == ["anna"] * 5


@pytest.mark.parametrize("most", [1, 2, 6])
async def test_no_turn_is_ever_in_a_step_of_another_line(tmp_path: Path, most: int) -> None:
    """Also when lines make room for each other, and the server is killed at any moment."""
    dice = random.Random(most)
    owners = ["anna", "ben", "carl", "imported"]
    # Whatever the order of the steps is, none of the turns is too old for its step.
    team = TeamRun(tmp_path / "run", most, max_staleness=1000)
    own: dict[str, list[int]] = {owner: [] for owner in owners}
    try:
        for _ in range(4):
            await team.start()
            for _ in range(6):
                owner = dice.choice(owners)
                own[owner] += team.judged(owner, dice.choice([1, 2, 4]))
                await asyncio.sleep(dice.choice([0, 0.01, 0.05]))
            held = sum(loop.phase is not Phase.UNPREPARED for loop in team.loops())
            assert held <= most
            await team.kill()
        await team.start()
        full = [turn for turns in own.values() for turn in turns[: len(turns) // 2 * 2]]
        await team.trained(*full)
        for owner in owners:
            line = SHARED if owner == "imported" else owner
            steps = team.steps(line)
            flat = [turn for step in steps for turn in step]
            assert len(set(flat)) == len(flat)
            assert set(flat) <= set(own[owner])
            await team.lines.serve(line)
            policy = team.served(line)
            assert policy[len(policy) - len(steps) :] == steps
    finally:
        await team.kill()
        team.book.close()


async def test_killed_in_a_step_of_one_line_all_lines_resume_exactly(team: TeamRun) -> None:
    await team.start()
    first = {owner: team.judged(owner) for owner in ("anna", "ben")}
    await team.trained(*first["anna"], *first["ben"])
    reached = asyncio.Event()

    def hang(_sequences: Any) -> Any:
        reached.set()
        return forever()

    team.learner.lines["anna"].hooks["step"] = hang
    second = {"anna": team.judged("anna")}
    await reached.wait()
    second["ben"] = team.judged("ben")
    await team.kill()
    assert lines_on_disk(team.folder) == ["anna", "ben"]
    await team.start(learning=False)
    for owner in ("anna", "ben"):
        await team.lines.serve(owner)
        assert team.served(owner) == [first[owner]], "what served last serves again at once"
    team.learn()
    await team.trained(*second["anna"], *second["ben"])
    for owner in ("anna", "ben"):
        assert team.served(owner) == [first[owner], second[owner]] == team.steps(owner)


async def test_a_line_that_is_dropped_is_gone_and_others_are_as_they_were(team: TeamRun) -> None:
    await team.start()
    anna, ben = team.judged("anna"), team.judged("ben")
    await team.trained(*anna, *ben)
    await team.lines.finish()
    before = {path: path.read_bytes() for path in line_folder(team.folder, "anna").rglob("*") if path.is_file()}
    assert before
    assert await team.lines.drop("ben")
    assert not line_folder(team.folder, "ben").exists()
    assert team.sampler.versions_of("ben") == []
    assert team.sampler.newest_of("ben") == 0
    assert {path: path.read_bytes() for path in before} == before
    assert team.steps("ben") == []
    for nobody in ("ben", "", ".", "..", "../anna", SHARED):
        assert not await team.lines.drop(nobody)
    assert {path: path.read_bytes() for path in before} == before


async def test_a_line_that_is_being_trained_can_be_dropped(team: TeamRun) -> None:
    await team.start()
    ready = asyncio.Event()
    learner = team.learner.for_line("ben")

    async def hang() -> None:
        ready.set()
        await learner.stopped.wait()
        raise StepRefused("stopped")

    learner.hooks["step"] = lambda _sequences: hang()
    team.judged("ben")
    await ready.wait()
    assert await team.lines.drop("ben")
    assert not line_folder(team.folder, "ben").exists()
    learner.hooks.clear()
    anna = team.judged("anna")
    await team.trained(*anna)


async def test_a_rollback_is_about_one_line(team: TeamRun) -> None:
    await team.start()
    anna, ben = team.judged("anna"), team.judged("ben")
    await team.trained(*anna, *ben)
    await (await team.lines.open("anna")).roll_back(None)
    assert (team.served("anna"), team.served("ben")) == ([], [ben])
    assert (team.steps("anna"), team.steps("ben")) == ([], [ben])
    later = team.judged("anna")
    await team.trained(*later)
    assert team.served("anna") == [later]


async def test_a_refused_batch_is_quarantined_in_its_line_and_others_go_on(team: TeamRun) -> None:
    await team.start()
    learner = team.learner.for_line("anna")

    def refuse(_sequences: Any) -> None:
        raise StepRefused("the loss is not finite")

    learner.hooks["step"] = refuse
    team.judged("anna")
    ben = team.judged("ben")
    await team.trained(*ben)
    await team.until(lambda: ("anna", "quarantined") in team.book.rows("SELECT line, outcome FROM updates"))


async def test_more_lines_than_the_learner_holds_are_saved_before_they_make_room(tmp_path: Path) -> None:
    team = TeamRun(tmp_path / "run", most=1)
    try:
        await team.start()
        turns: dict[str, list[list[int]]] = {}
        for _ in range(3):
            for owner in ("anna", "ben", "carl"):
                batch = team.judged(owner)
                await team.trained(*batch)
                turns.setdefault(owner, []).append(batch)
        for owner, batches in turns.items():
            assert team.served(owner) == batches
        assert sum(loop.phase is not Phase.UNPREPARED for loop in team.loops()) == 1
        saved = Checkpoints.of_run(line_folder(team.folder, "anna"), 3).latest()
        assert saved is not None
        assert read_policy(saved.folder) == turns["anna"]
    finally:
        await team.kill()
        team.book.close()


async def test_the_number_of_lines_in_the_metrics_is_bounded(team: TeamRun) -> None:
    await team.start(learning=False)
    for number in range(MAX_LINES_SHOWN + 5):
        await team.lines.open(f"person-{number}")
    told = generate_latest(team.registry).decode()
    assert told.count("openclaw_line_steps_total{") == MAX_LINES_SHOWN + 1
    assert 'openclaw_line_steps_total{line="other"}' in told


async def test_the_gate_keeps_a_policy_of_one_line_from_serving(team: TeamRun, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []

    class OfLine:
        margin = 0.1

        def __init__(self, _items: Any, _margin: float, sampler: Any, _renderer: Any) -> None:
            self.line = sampler.line

        async def examine(self, version: int) -> float:
            asked.append((self.line, version))
            return 0.0 if self.line == "anna" and version else 1.0

    monkeypatch.setattr(build, "Gate", OfLine)
    monkeypatch.setattr(build, "read_items", lambda _path: [])
    team.options["gate"] = Path("gate.jsonl")
    await team.start()
    team.judged("anna")
    ben = team.judged("ben")
    await team.trained(*ben)
    await team.until(lambda: ("anna", "quarantined") in team.book.rows("SELECT line, outcome FROM updates"))
    assert (team.served("anna"), team.served("ben")) == ([], [ben])
    assert {line for line, _ in asked} == {"anna", "ben"}


async def test_the_guard_takes_back_the_policy_of_one_line(
    team: TeamRun, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "GuardWatch", lambda registry: GuardWatch(registry, Budget(math.inf)))
    team.options["guard"] = True
    team.renderer = ChatRenderer(tiny_model)
    await team.start()
    good = {owner: team.judged(owner) for owner in ("anna", "ben")}
    await team.trained(*good["anna"], *good["ben"])
    bad = team.judged("anna")
    team.bad |= set(bad)
    await team.until(lambda: {team.book.state(turn) for turn in bad} == {State.DROPPED})
    await team.until(lambda: team.served("anna") == [good["anna"]])
    assert (team.steps("anna"), team.served("ben")) == ([good["anna"]], [good["ben"]])
    anna, ben = (team.lines.loops[owner].guard for owner in ("anna", "ben"))
    await team.until(lambda: anna.is_cautious)
    assert not ben.is_cautious
    assert (line_folder(team.folder, "anna") / GUARD_FILE).is_file()
    later = team.judged("ben")
    await team.trained(*later)


async def test_practised_answers_teach_the_line_of_their_owner(team: TeamRun) -> None:
    await team.start()
    note = team.book.change(notes.add, "anna", "Call me chef.")
    practised = team.book.change(begin, note.number, *[None] * practices.BATCH)
    ben = team.judged("ben")
    await team.trained(*practised, *ben)
    assert (team.served("anna"), team.served("ben"), team.served(SHARED)) == ([practised], [ben], [])


@pytest.mark.more
async def test_a_guard_that_leaves_a_line_blames_no_step_of_the_shared_one(
    team: TeamRun, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Later(Budget):
        is_due = False

    budget = Later(0.05)
    monkeypatch.setattr(build, "GuardWatch", lambda registry: GuardWatch(registry, budget))
    team.options["guard"] = True
    team.renderer = ChatRenderer(tiny_model)
    await team.start()
    imported = team.judged("imported")
    await team.trained(*imported)
    bad = team.judged("anna")
    team.bad |= set(bad)
    await team.trained(*bad)
    monkeypatch.setattr(Later, "is_due", True)
    await team.until(lambda: team.lines.loops["anna"].guard.is_cautious)
    assert team.served("anna") == [imported], "anna has the policy again that her line began from"
    assert team.book.rows("SELECT outcome, reason FROM updates WHERE line = 'shared'") == [("applied", "")]
    assert {team.book.state(turn) for turn in bad} == {State.DROPPED}


async def test_each_line_learns_again_without_what_was_deleted_from_it(tmp_path: Path) -> None:
    team = TeamRun(tmp_path / "run", save_interval=1)
    try:
        await team.start()
        kept = team.judged("imported", session="kept")
        await team.trained(*kept)
        deleted = team.judged("imported", session="deleted")
        await team.trained(*deleted)
        anna = team.judged("anna", session="anna")
        await team.trained(*anna)
        await team.stop_learning()
        # A sampler forgets versions that serve nobody.
        team.sampler.policies.pop(1)
        sessions = {
            row for (row,) in team.book.rows(f"SELECT session FROM turns WHERE number IN ({deleted[0]}, {anna[0]})")
        }
        team.book.change(deletion.delete_sessions, sorted(sessions))
        await team.lines.retrain()
        assert team.served(SHARED) == [kept]
        assert team.served("anna") == []
    finally:
        await team.kill()
        team.book.close()


async def test_killed_while_a_line_is_dropped_its_old_turns_are_not_learned_again(
    team: TeamRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    await team.start()
    old = team.judged("ben")
    await team.trained(*old)
    await team.lines.finish()
    write = team.book.ledger.write

    async def killed(change: Any, *given: Any, **named: Any) -> Any:
        if change is training.follow:
            raise asyncio.CancelledError
        return await write(change, *given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(team.book.ledger, "write", killed)
        with pytest.raises(asyncio.CancelledError):
            await team.lines.drop("ben")
    await team.kill()
    await team.start()
    new = team.judged("ben")
    await team.trained(*new)
    assert team.served("ben") == [old, new], "the line was not deleted: whoever asked for it asks again"
    assert team.learner.order == ["ben"]


async def test_who_is_next_is_read_once_for_all_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --batch-timeout each line with a turn is asked, and the server answers nobody meanwhile."""
    team = await TeamRun(tmp_path / "run", batch_timeout=3600.0).start(learning=False)
    people = [f"person{number}" for number in range(8)]
    for person in people:
        team.judged(person, 1)
        await team.lines.open(person)
    read, reads = team.book.ledger.read, []

    def counted(query: Any, *given: Any) -> Any:
        reads.append(query)
        return read(query, *given)

    monkeypatch.setattr(team.book.ledger, "read", counted)
    assert not await team.lines._take_turn()
    assert len(reads) == 1
    await team.kill()
    team.book.close()


@pytest.mark.more
async def test_a_line_that_cannot_be_saved_pauses_alone(tmp_path: Path) -> None:
    team = TeamRun(tmp_path / "run", most=1)

    def full(_folder: Any) -> None:
        raise OSError("the disk is full")

    try:
        await team.start()
        learner = team.learner.for_line("anna")
        learner.hooks["save_recovery"] = full
        anna = team.judged("anna")
        await team.trained(*anna)
        ben = team.judged("ben")
        await team.until(lambda: any(loop.trouble for loop in team.loops()))
        assert team.lines.loops["anna"].trouble == "the disk is full"
        assert not team.lines.loops["ben"].trouble
        assert team.served("anna") == [anna]
        learner.hooks.clear()
        await team.trained(*ben)
        assert (team.served("anna"), team.served("ben")) == ([anna], [ben])
    finally:
        await team.kill()
        team.book.close()


async def test_a_policy_that_serves_since_a_restart_keeps_its_files(team: TeamRun) -> None:
    team.options["save_interval"] = 100
    await team.start()
    anna = team.judged("anna")
    await team.trained(*anna)
    await team.lines.loops["anna"].park()
    await team.kill()
    assert list(line_folder(team.folder, "anna").glob("recovery/*"))
    await team.start(learning=False)
    await team.lines.serve("anna")
    loop = team.lines.loops["anna"]
    await loop.prepare()
    # It writes a checkpoint, which replaces the state for recovery.
    assert await loop.save()
    assert team.served("anna") == [anna]
    assert team.sampler.folders[team.sampler.newest_of("anna")].is_dir()
