"""Tasks in the format of SWE-bench: `instances.jsonl`, and the repositories that it names.

    FOLDER/instances.jsonl              one instance a line
    FOLDER/repos/INSTANCE_ID/           its files at the base commit, or
    FOLDER/repos/OWNER__NAME/           a clone (also a bare one) that has the base commit

With docker or podman the files are those of the instance's image.
"""

import asyncio
import io
import json
import shutil
import subprocess
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Step, Task, Tool
from openclaw_rl.envs.swe.episode import RepositoryEpisode, TestGoal
from openclaw_rl.envs.swe.packages import Files
from openclaw_rl.envs.swe.repository import FolderTree, Repository
from openclaw_rl.envs.swe.suites import Interpreter, PytestSuite
from openclaw_rl.envs.swe.tools import TOOLS
from openclaw_rl.lab.tasks import SPLITS, checked_split, digest, first_problem, in_rounds, read_json_lines, split_of
from openclaw_rl.sandbox.base import Sandbox
from openclaw_rl.sandbox.kinds import ContainerSandbox

INSTANCES = "instances.jsonl"
REPOS = "repos"
#: Where the official images have the repository, and the Python that has what it needs.
IMAGE_FOLDER = "/testbed"
IMAGE_PYTHON = "/opt/miniconda3/envs/testbed/bin/python"
#: The name of an official image; __ in an instance's id is written as _1776_.
IMAGE = "swebench/sweb.eval.x86_64.{}:latest"
#: How long git and container runtimes may take.
EXPORT_SECONDS = 600
#: Most repositories that are exported at the same time.
MAX_EXPORTS_AT_ONCE = 4
INSTRUCTION = "Fix the issue in the repository with the tools. When you have finished, write: Done."


class Instance(BaseModel):
    """One line of the file. Members that are not needed here are ignored."""

    model_config = ConfigDict(frozen=True)

    instance_id: str = Field(pattern=r"^\w[\w.-]*$", max_length=200)
    repo: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    base_commit: str = Field("HEAD", pattern=r"^\w+$")
    problem_statement: str
    test_patch: str = ""
    patch: str = ""
    must_pass: list[str] = Field(alias="FAIL_TO_PASS", min_length=1)
    must_keep: list[str] = Field([], alias="PASS_TO_PASS")
    image_name: str = ""
    split: str = ""

    @field_validator("must_pass", "must_keep", mode="before")
    @classmethod
    def _list(cls, value: Any) -> Any:
        # In the published files the lists are JSON in a string.
        return json.loads(value) if isinstance(value, str) else value

    @field_validator("split")
    @classmethod
    def _known_split(cls, value: str) -> str:
        if value not in ("", *SPLITS):
            raise ValueError(f"there is no split {value}; the splits are {' and '.join(SPLITS)}")
        return value

    @property
    def in_split(self) -> str:
        return self.split or split_of(digest(self.instance_id))

    @property
    def image(self) -> str:
        return self.image_name or IMAGE.format(self.instance_id.lower().replace("__", "_1776_"))


def read_instances(folder: Path) -> list[Instance]:
    """The instances of a folder. Raises ConfigError, which names the line."""
    file = folder if folder.suffix == ".jsonl" else folder / INSTANCES
    instances = []
    for place, line in read_json_lines(file, "path"):
        try:
            instance = Instance.model_validate(line)
        except ValidationError as error:
            raise ConfigError(f"{place}: {first_problem(error)}.") from None
        if wrong := [id_ for id_ in [*instance.must_pass, *instance.must_keep] if "::" not in id_]:
            raise ConfigError(f"{place}: {wrong[0]} is not a test of pytest, such as tests/test_a.py::test_b.")
        instances.append(instance)
    if not instances:
        raise ConfigError(f"{file} has no instances.")
    return instances


class SweBench:
    """Instances of a file, each with its repository.

    - A split gives its instances in an order that the seed decides, without end.
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
        self._sandbox = sandbox
        self._path = path
        self._interpreter = interpreter
        self._seconds = seconds
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
        return in_rounds(f"swe {split}", [Task(f"swe/{id_}", {"instance": id_}) for id_ in ids], seed)

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
            files = Path(folder) / "files"
            tests = Path(folder) / "tests"
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
        sandbox = self._sandbox
        interpreter = self._interpreter
        if isinstance(sandbox, ContainerSandbox):
            sandbox = ContainerSandbox(sandbox.name, instance.image)
            interpreter = Interpreter(IMAGE_PYTHON)
        return PytestSuite(sandbox, interpreter, tests, [*instance.must_pass, *instance.must_keep], self._seconds)


class BenchEpisode:
    """One attempt at an instance. Its repository is exported when it begins."""

    tools: Sequence[Tool] = TOOLS

    def __init__(self, bench: SweBench, instance: Instance) -> None:
        self._bench = bench
        self._instance = instance
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


def find_checkout(folder: Path, instance: Instance) -> Path:
    """The folder or the clone of an instance. Raises ConfigError."""
    repos = (folder.parent if folder.suffix == ".jsonl" else folder) / REPOS
    places = [repos / instance.instance_id, repos / instance.repo.replace("/", "__")]
    for place in places:
        if place.is_dir():
            return place
    raise ConfigError(f"{instance.instance_id} has no repository: neither {places[0]} nor {places[1]} is there.")


def is_clone(checkout: Path, instance: Instance) -> bool:
    """Whether a checkout is a clone, which has other commits too, and not the instance's own folder."""
    return checkout.name != instance.instance_id


def needs_git(instance: Instance, checkout: Path | None) -> bool:
    """Whether git has to export the repository or apply the test patch. In a container there is no checkout."""
    return bool(instance.test_patch) or (checkout is not None and is_clone(checkout, instance))


def export_clone(clone: Path, commit: str, target: Path) -> None:
    """Write the files of a commit into a folder. Blocks. Raises EnvFailed."""
    packed = _run(["git", "-C", str(clone), "archive", "--format=tar", commit])
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(target, filter="tar")


def export_image(runtime: str, image: str, target: Path) -> None:
    """Write the repository of an image into a folder. Blocks. Raises EnvFailed."""
    container = _run([runtime, "create", image]).decode().strip()
    try:
        _run([runtime, "cp", f"{container}:{IMAGE_FOLDER}/.", str(target)])
    finally:
        _run([runtime, "rm", "--force", container])


def patched_tests(checkout: Path, instance: Instance, work: Path) -> Files:
    """The tests that decide, as texts, after the instance's test patch. `work` is an empty folder. Blocks."""
    paths = {id_.partition("::")[0] for id_ in [*instance.must_pass, *instance.must_keep]}
    paths |= {line[6:].strip() for line in instance.test_patch.splitlines() if line.startswith("+++ b/")}
    for path in paths:
        if (checkout / path).is_file():
            (work / path).parent.mkdir(parents=True, exist_ok=True)
            (work / path).write_bytes((checkout / path).read_bytes())
    if instance.test_patch:
        # Not as a part of a repository that the folder may be in.
        _run(["git", "-C", str(work), "--git-dir=/dev/null", "apply", "-"], instance.test_patch.encode())
    try:
        return {path: (work / path).read_text("utf-8") for path in sorted(paths) if (work / path).is_file()}
    except UnicodeDecodeError as error:
        raise EnvFailed(f"a test of {instance.instance_id} is not text: {error}") from None


def _run(argv: list[str], stdin: bytes = b"") -> bytes:
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, timeout=EXPORT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvFailed(f"{argv[0]} could not be run: {error}") from None
    if done.returncode:
        raise EnvFailed(f"{' '.join(argv[:6])} failed: {done.stderr.decode(errors='replace').strip()[-300:]}")
    return done.stdout
