"""The environment `swe`: bugs planted in small packages, without end, or tasks in the format of SWE-bench."""

import math
import os
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Environment, Message, Task
from openclaw_rl.envs.calls import call_message
from openclaw_rl.envs.swe.assert_tests import BARE_PYTHON, AssertSuite
from openclaw_rl.envs.swe.bench import SweBench, read_instances
from openclaw_rl.envs.swe.bugs import KINDS
from openclaw_rl.envs.swe.edit_blocks import EditBlock
from openclaw_rl.envs.swe.episode import RepositoryEpisode, TestGoal
from openclaw_rl.envs.swe.planting import BugDraft, draw, draw_examples
from openclaw_rl.envs.swe.repository import Repository, TextTree
from openclaw_rl.envs.swe.suites import Interpreter, check_python
from openclaw_rl.lab.tasks import checked_examples, checked_split, digest, several
from openclaw_rl.sandbox.base import Sandbox
from openclaw_rl.sandbox.kinds import CONTAINERS, choose_sandbox

#: The variable that names the folder of instances.
PATH_VARIABLE = "SWE_BENCH_PATH"
#: The image in which generated tasks are tested, with docker or podman.
PYTHON_IMAGE = "python:3.12-slim"
#: Seconds for one run of pytest: a call of the environment may take 120 by default.
PYTEST_SECONDS = 100.0
#: Level → what it asks for.
LEVELS = {
    1: "one short function, which is shown; one edit, with which the attempt ends",
    2: "a package with a bug; the issue says what is wrong, and the tools find it",
    3: "a package with two bugs; the issue only names the tests that fail",
}
#: An example has up to eight messages, and an episode begins with at most 64.
MAX_EXAMPLES = 6
ONE_EDIT = "Fix the bug with one edit: the lines to find, and the lines that replace them."
USE_TOOLS = "Fix the bug in the repository with the tools. When the tests pass, write: Done."


def make_swe(
    levels: int | Sequence[int] | None = None,
    kinds: str | Sequence[str] | None = None,
    examples: int | None = None,
    path: str | Path | None = None,
    python: str | None = None,
    seconds: float | None = None,
    sandbox: str = "auto",
    unsafe_no_sandbox: bool = False,
) -> Environment:
    """The environment of the given settings. Raises ConfigError."""
    generated: dict[str, Any] = _given(levels=levels, kinds=kinds, examples=examples)
    of_instances: dict[str, Any] = _given(python=python, seconds=seconds)
    if path is None and not (generated and not of_instances):
        path = os.environ.get(PATH_VARIABLE) or None
    if path is None:
        if of_instances:
            raise ConfigError(f"{next(iter(of_instances))} is for instances of SWE-bench; name their folder with path.")
        chosen = choose_sandbox(sandbox, unsafe_no_sandbox, PYTHON_IMAGE)
        environment = PlantedBugs(chosen, **generated)
        check_python(chosen, [*BARE_PYTHON, "import json"])
        return environment
    if generated:
        raise ConfigError(f"{next(iter(generated))} is for generated tasks; with path, tasks are in a file.")
    return _make_bench(Path(path).expanduser(), sandbox, unsafe_no_sandbox, **of_instances)


def _make_bench(
    path: Path,
    sandbox: str,
    unsafe_no_sandbox: bool,
    python: str = "python3",
    seconds: float = PYTEST_SECONDS,
) -> SweBench:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigError(f"seconds of swe must be a number above 0, not {seconds!r}.")
    instances = read_instances(path)
    if sandbox in CONTAINERS:
        chosen = choose_sandbox(sandbox, image=instances[0].image)
        return SweBench(chosen, path, instances, Interpreter(), seconds)
    chosen = choose_sandbox(sandbox, unsafe_no_sandbox)
    # A virtual environment's Python is a link, and its packages are beside it.
    interpreter = Interpreter(python, [Path(python).parents[1]] if os.path.isabs(python) else [])
    environment = SweBench(chosen, path, instances, interpreter, seconds)
    check_python(chosen, interpreter.argv("-c", "import pytest"), interpreter.readable)
    return environment


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}


class PlantedBugs:
    """Small packages with bugs.

    - The same split and seed give the same tasks.
    - A package belongs to one split, so held-out tasks are in packages that training has never shown. The examples are
      of a package of their own.
    - All tasks of a level and kind have the same examples, so the server reads them once and keeps them in its cache.
    - `open` needs only the task: its data holds the files, the tests and the examples.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        levels: int | Sequence[int] = (1,),
        kinds: str | Sequence[str] = tuple(KINDS),
        examples: int = 2,
    ) -> None:
        self.about = sandbox.about
        self._sandbox = sandbox
        self._levels = several("swe", "level", levels, LEVELS)
        self._kinds = several("swe", "kind", kinds, KINDS)
        self._examples = checked_examples("swe", examples, MAX_EXAMPLES)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        checked_split("swe", split)
        return (self._task(split, Random(f"swe {split} {seed} {index}")) for index in count())

    def open(self, task: Task) -> RepositoryEpisode:
        data = task.data
        return RepositoryEpisode(
            Repository(TextTree(data["files"])),
            AssertSuite(self._sandbox, data["tests"]),
            data["messages"],
            TestGoal(data["must_pass"], data["must_keep"]),
            single_edit=data["level"] == 1,
            solution=solution_in_words(data["solution"]),
        )

    def _task(self, split: str, random: Random) -> Task:
        level = random.choice(self._levels)
        kind = random.choice(self._kinds)
        draft = draw(split, level, kind, random)
        messages: list[Message] = [{"role": "system", "content": ONE_EDIT if level == 1 else USE_TOOLS}]
        for index, solved in enumerate(draw_examples(kind, self._examples)):
            messages += example(solved, level, index)
        data = {
            "level": level,
            "kind": kind,
            "messages": [*messages, {"role": "user", "content": question(draft, level)}],
            "files": draft.files,
            "tests": dict(draft.package.tests),
            "must_pass": [id_ for id_, result in draft.results.items() if not result.passed],
            "must_keep": [id_ for id_, result in draft.results.items() if result.passed],
            "solution": [{"path": path, "old": bug.old, "new": bug.new} for path, bug in draft.bugs],
        }
        name = digest([draft.files, level])
        return Task(f"swe/{split}/{draft.package.name}-{level}-{name:016x}", data)


def question(draft: BugDraft, level: int) -> str:
    """What the policy is told about a bug."""
    if level == 1:
        path, text = next((path, bug.text) for path, bug in draft.bugs)
        return f"{draft.issue}\n\n{path}\n```python\n{text}```"
    failing = "\n".join(draft.failing)
    if level == 2:
        return f"{draft.issue}\n\nFailing tests:\n{failing}\n\nFiles:\n" + "\n".join(sorted(draft.files))
    return f"These tests fail:\n{failing}"


def example(draft: BugDraft, level: int, index: int) -> list[Message]:
    """A question and how it is answered, as messages."""
    (path, bug) = draft.bugs[0]
    asked = {"role": "user", "content": question(draft, level)}
    if level == 1:
        return [asked, {"role": "assistant", "content": str(EditBlock("", bug.old, bug.new))}]
    number_of_tests = len(draft.results)
    calls: list[tuple[str, dict[str, str], str]] = [
        ("read_file", {"path": path}, bug.text.rstrip("\n")),
        ("edit", {"path": path, "old": bug.old, "new": bug.new}, f"Replaced the text in {path}."),
        ("run_tests", {}, f"All {number_of_tests} tests pass."),
    ]
    messages: list[Message] = [asked]
    for number, (name, arguments, result) in enumerate(calls):
        id_ = f"example{index}{number}"
        messages.append(call_message(name, arguments, id_))
        messages.append({"role": "tool", "tool_call_id": id_, "content": result})
    return [*messages, {"role": "assistant", "content": "Done."}]


def solution_in_words(edits: Sequence[dict[str, str]]) -> str:
    """A hint that names the edits."""
    return "\n".join(f"In {edit['path']}, replace\n{edit['old']}\nby\n{edit['new']}" for edit in edits)
