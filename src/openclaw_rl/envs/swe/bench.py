"""The environment `swe` with tasks in the format of SWE-bench."""

import asyncio
import functools
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Step, Task, Tool
from openclaw_rl.envs.choices import checked_split
from openclaw_rl.envs.swe.episode import RepositoryEpisode
from openclaw_rl.envs.swe.instances import (
    IMAGE_PYTHON,
    Instance,
    export_clone,
    export_image,
    find_checkout,
    patched_tests,
)
from openclaw_rl.envs.swe.packages import Files
from openclaw_rl.envs.swe.pytest_suite import Interpreter, PytestSuite
from openclaw_rl.envs.swe.repository import FolderTree, Repository
from openclaw_rl.envs.swe.scoring import TestGoal
from openclaw_rl.envs.swe.suites import PlainSuite, TestSuite
from openclaw_rl.envs.swe.tools import TOOLS
from openclaw_rl.sandbox.base import Sandbox
from openclaw_rl.sandbox.kinds import ContainerSandbox

INSTRUCTION = "Fix the issue in the repository with the tools. When you have finished, write: Done."


class SweBench:
    """Instances of a file, each with its repository.

    - A split gives its instances in an order that the seed decides, again and again.
    - A repository is exported once; an episode never changes it.
    - At the end, the tests of the instance's test patch are put into a clean copy with the policy's edits of sources.
    - With docker or podman, files and Python are those of the instance's image.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        path: Path,
        instances: Sequence[Instance],
        runner: str,
        interpreter: Interpreter,
        seconds: float,
    ) -> None:
        self.about = sandbox.about
        self._sandbox, self._path, self._runner = sandbox, path, runner
        self._interpreter, self._seconds = interpreter, seconds
        self._instances = {instance.instance_id: instance for instance in instances}
        if not isinstance(sandbox, ContainerSandbox):
            for instance in self._instances.values():
                find_checkout(path, instance)
        self._work = Path(tempfile.mkdtemp(prefix="openclaw-bench-"))
        self._locks: dict[str, asyncio.Lock] = {}

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        checked_split("swe", split)
        ids = sorted(id_ for id_, instance in self._instances.items() if instance.in_split == split)
        if not ids:
            raise ConfigError(f"{self._path} has no instances of the split {split}.")
        return self._shuffled(ids, Random(f"swe {split} {seed}"))

    def open(self, task: Task) -> "BenchEpisode":
        return BenchEpisode(self, self._instances[task.data["instance"]])

    def close(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)

    async def begin(self, instance: Instance) -> RepositoryEpisode:
        """An episode in the instance's repository. Raises EnvFailed."""
        async with self._locks.setdefault(instance.instance_id, asyncio.Lock()):
            checkout, tests = await asyncio.to_thread(self._exported, instance.instance_id)
        goal = TestGoal(instance.must_pass, instance.must_keep)
        messages = [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": instance.problem_statement},
        ]
        repository = Repository(FolderTree(checkout), tests)
        return RepositoryEpisode(repository, self._suite(instance, tests), messages, goal)

    @functools.cache  # noqa: B019 - it lives as long as the environment
    def _exported(self, id_: str) -> tuple[Path, Files]:
        """The folder with an instance's files, and its tests. Blocks."""
        instance, folder = self._instances[id_], self._work / id_
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "tests").mkdir(parents=True)
        checkout = folder / "files"
        checkout.mkdir()
        if isinstance(self._sandbox, ContainerSandbox):
            export_image(self._sandbox.name, instance.image, checkout)
        else:
            source = find_checkout(self._path, instance)
            if source.name == instance.instance_id:
                checkout = source
            else:
                export_clone(source, instance.base_commit, checkout)
        return checkout, patched_tests(checkout, instance, folder / "tests")

    def _suite(self, instance: Instance, tests: Files) -> TestSuite:
        sandbox, interpreter = self._sandbox, self._interpreter
        if isinstance(sandbox, ContainerSandbox):
            sandbox, interpreter = ContainerSandbox(sandbox.name, instance.image), Interpreter(IMAGE_PYTHON)
        if self._runner == "plain":
            return PlainSuite(sandbox, tests)
        return PytestSuite(sandbox, interpreter, tests, [*instance.must_pass, *instance.must_keep], self._seconds)

    @staticmethod
    def _shuffled(ids: list[str], random: Random) -> Iterator[Task]:
        while True:
            random.shuffle(ids)
            yield from (Task(f"swe/{id_}", {"instance": id_}) for id_ in list(ids))


class BenchEpisode:
    """One attempt at an instance. Its repository is exported when it begins."""

    tools: Sequence[Tool] = TOOLS

    def __init__(self, bench: SweBench, instance: Instance) -> None:
        self._bench, self._instance = bench, instance
        self._episode: RepositoryEpisode | None = None

    async def start(self) -> Sequence[Message]:
        self._episode = await self._bench.begin(self._instance)
        return await self._episode.start()

    async def step(self, answer: Message) -> Step:
        return await self._begun().step(answer)

    async def outcome(self) -> Outcome:
        return await self._begun().outcome()

    async def close(self) -> None:
        """Nothing to close: every run of tests has a folder of its own."""

    def _begun(self) -> RepositoryEpisode:
        if self._episode is None:
            raise EnvFailed("the episode has not been started")
        return self._episode
