"""A run directory in which each person has a line, with a scripted learner and sampler."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from openclaw_rl.engines.base import EngineUnavailable, PolicyRef
from openclaw_rl.learn.build import LearnSetup, build_lines, where_to_begin
from openclaw_rl.learn.lines import Lines
from openclaw_rl.learn.options import TrainingOptions
from openclaw_rl.learn.plain_answers import plain_prompts
from openclaw_rl.learn.step import Phase
from openclaw_rl.ledger import verdicts
from openclaw_rl.types import SHARED, SampleKind, SampleRequest, Source, State, Verdict
from support.fakes import ScriptedLearner, ScriptedSampler, ScriptedStream, read_policy
from support.methods import a_method
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

    async def erase(self, folder: Path, run_dir: Path) -> None: ...


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
        self.registry = CollectorRegistry()
        self.threads = ThreadPoolExecutor()
        asyncio.get_running_loop().set_default_executor(self.threads)
        self.learner, self.sampler = await self.start_engines()
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

    async def start_engines(self) -> tuple[Any, Any]:
        sampler = SamplerOfLines()
        sampler.says(self.renderer, self.bad)
        return LearnerOfLines(), sampler

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
