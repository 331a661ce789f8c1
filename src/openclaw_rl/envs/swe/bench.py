"""The environment `swe` with tasks in the format of SWE-bench."""

import asyncio
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from random import Random

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Step, Task, Tool
from openclaw_rl.envs.choices import checked_split
from openclaw_rl.envs.swe.episode import RepositoryEpisode, TestGoal
from openclaw_rl.envs.swe.instances import (
    IMAGE_PYTHON,
    Instance,
    export_clone,
    export_image,
    find_checkout,
    is_clone,
    needs_git,
    patched_tests,
)
from openclaw_rl.envs.swe.packages import Files
from openclaw_rl.envs.swe.repository import FolderTree, Repository
from openclaw_rl.envs.swe.suites import Interpreter, PytestSuite
from openclaw_rl.envs.swe.tools import TOOLS
from openclaw_rl.sandbox.base import Sandbox
from openclaw_rl.sandbox.kinds import ContainerSandbox

#: Most repositories that are exported at the same time.
MAX_EXPORTS_AT_ONCE = 4
INSTRUCTION = "Fix the issue in the repository with the tools. When you have finished, write: Done."


class SweBench:
    """Instances of a file, each with its repository.

    - A split gives its instances in an order that the seed decides, again and again.
    - A repository is exported once, and all its episodes wait for that export. It goes on if one of them gives up;
      only a failed export is tried again. An episode never changes the exported files.
    - At the end, the tests of the instance's test patch are put into a clean copy with the policy's edits of sources.
    - With docker or podman, files and Python are those of the instance's image.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        path: Path,
        instances: Sequence[Instance],
        interpreter: Interpreter,
        seconds: float,
    ) -> None:
        self.about = sandbox.about
        self._sandbox, self._path = sandbox, path
        self._interpreter, self._seconds = interpreter, seconds
        self._instances = {instance.instance_id: instance for instance in instances}
        in_container = isinstance(sandbox, ContainerSandbox)
        for instance in instances:
            checkout = None if in_container else find_checkout(path, instance)
            if needs_git(instance, checkout) and shutil.which("git") is None:
                raise ConfigError(f"{instance.instance_id} needs git, which is not installed.")
        self._work: Path | None = None
        self._threads = ThreadPoolExecutor(MAX_EXPORTS_AT_ONCE, "export")
        self._exports: dict[str, Future[tuple[Path, Files]]] = {}

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        checked_split("swe", split)
        ids = sorted(id_ for id_, instance in self._instances.items() if instance.in_split == split)
        if not ids:
            raise ConfigError(f"{self._path} has no instances of the split {split}.")
        return self._shuffled(ids, Random(f"swe {split} {seed}"))

    def open(self, task: Task) -> "BenchEpisode":
        return BenchEpisode(self, self._instances[task.data["instance"]])

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        # An export that still runs would make its folder again, so it has to end first.
        threading.Thread(target=self._delete_work).start()

    def _delete_work(self) -> None:
        self._threads.shutdown(wait=True)
        if self._work is not None:
            shutil.rmtree(self._work, ignore_errors=True)

    async def begin(self, instance: Instance) -> RepositoryEpisode:
        """An episode in the instance's repository. Raises EnvFailed."""
        checkout, tests = await asyncio.shield(asyncio.wrap_future(self._exported(instance)))
        goal = TestGoal(instance.must_pass, instance.must_keep)
        messages = [
            {"role": "system", "content": INSTRUCTION},
            {"role": "user", "content": instance.problem_statement},
        ]
        repository = Repository(FolderTree(checkout), tests)
        return RepositoryEpisode(repository, self._suite(instance, tests), messages, goal)

    def _exported(self, instance: Instance) -> Future[tuple[Path, Files]]:
        """The export of an instance, which is shared: the folder with its files, and its tests."""
        export = self._exports.get(instance.instance_id)
        if export is None or (export.done() and (export.cancelled() or export.exception())):
            if self._work is None:
                self._work = Path(tempfile.mkdtemp(prefix="openclaw-bench-"))
            export = self._threads.submit(self._export, instance, self._work)
            self._exports[instance.instance_id] = export
        return export

    def _export(self, instance: Instance, work: Path) -> tuple[Path, Files]:
        """Export into a new folder, and move the files to their place when they are complete. Blocks."""
        with tempfile.TemporaryDirectory(dir=work, ignore_cleanup_errors=True) as folder:
            files, tests = Path(folder) / "files", Path(folder) / "tests"
            files.mkdir()
            tests.mkdir()
            if isinstance(self._sandbox, ContainerSandbox):
                export_image(self._sandbox.name, instance.image, files)
            else:
                checkout = find_checkout(self._path, instance)
                if not is_clone(checkout, instance):
                    return checkout, patched_tests(checkout, instance, tests)
                export_clone(checkout, instance.base_commit, files)
            texts = patched_tests(files, instance, tests)
            return files.rename(work / instance.instance_id), texts

    def _suite(self, instance: Instance, tests: Files) -> PytestSuite:
        sandbox, interpreter = self._sandbox, self._interpreter
        if isinstance(sandbox, ContainerSandbox):
            sandbox, interpreter = ContainerSandbox(sandbox.name, instance.image), Interpreter(IMAGE_PYTHON)
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
