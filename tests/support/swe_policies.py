"""Policies for the environment swe, and what its tests share: a sandbox, and answers in the shape of the server's."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from openclaw_rl.envs.base import Message, Outcome, Step, Task
from openclaw_rl.envs.swe.assert_tests import AssertSuite
from openclaw_rl.envs.swe.edit_blocks import EditBlock
from openclaw_rl.envs.swe.environment import PlantedBugs
from openclaw_rl.envs.swe.episode import RepositoryEpisode, TestGoal
from openclaw_rl.envs.swe.repository import Repository, TextTree
from openclaw_rl.envs.swe.suites import TestSuite
from openclaw_rl.sandbox.kinds import choose_sandbox, problem_with

PROBLEMS = [problem_with(name) for name in ("bubblewrap", "fences")]
needs_sandbox = pytest.mark.skipif(all(PROBLEMS), reason=f"tests cannot be confined: {', '.join(PROBLEMS)}")

Policy = Callable[[Task], Iterator[Message]]


def text(content: str) -> Message:
    return {"role": "assistant", "content": content}


def call(name: str, **arguments: Any) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", "type": "function", "function": function}]}


def oracle(task: Task) -> Iterator[Message]:
    """Makes the edits that mend the bugs, in the form that the level asks for."""
    for edit in task.data["solution"]:
        if task.data["level"] == 1:
            yield text(str(EditBlock("", edit["old"], edit["new"])))
        else:
            yield call("edit", **edit)


def does_nothing(task: Task) -> Iterator[Message]:
    yield text("Done.")


def destroys_everything(task: Task) -> Iterator[Message]:
    """Empties every file, tests too."""
    for path, content in task.data["files"].items():
        if task.data["level"] == 1:
            path, content = next(iter(task.data["files"].items()))
            yield text(str(EditBlock(path, content.rstrip("\n"), "")))
            return
        yield call("edit", path=path, old=content, new="")


async def play(environment: PlantedBugs, task: Task, policy: Policy) -> Outcome:
    """One attempt of a policy."""
    episode = environment.open(task)
    for answer in policy(task):
        if (await episode.step(answer)).done:
            break
    outcome = await episode.outcome()
    await episode.close()
    return outcome


def small_episode(
    files: dict[str, str],
    tests: dict[str, str],
    *must_pass: str,
    keep: tuple[str, ...] = (),
    sandbox: str = "auto",
    suite: TestSuite | None = None,
) -> RepositoryEpisode:
    """An episode in a repository with tests in it. Their asserts are taken apart, unless a suite is given."""
    repository = Repository(TextTree({**files, **tests}))
    suite = suite or AssertSuite(choose_sandbox(sandbox), tests)
    return RepositoryEpisode(repository, suite, [], TestGoal(must_pass, keep))


def said(step: Step) -> str:
    """The text of a step with one message."""
    (message,) = step.messages
    return str(message["content"])
