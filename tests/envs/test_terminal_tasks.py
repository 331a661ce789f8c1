"""The environment `terminal`: its tasks, what solves them, and what does not."""

import asyncio
import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Environment, Outcome, Task
from openclaw_rl.envs.registry import make_environment
from openclaw_rl.envs.terminal import episode
from openclaw_rl.envs.terminal.environment import draw
from openclaw_rl.envs.terminal.families import FAMILIES
from openclaw_rl.sandbox.kinds import problem_with
from support.terminal_policies import Policy, attempt, destroys_everything, does_nothing, oracle

LEVELS = (1, 2, 3)
pytestmark = pytest.mark.skipif(
    bool(problem_with("bubblewrap")) and bool(problem_with("fences")),
    reason=f"commands cannot be confined: {problem_with('bubblewrap')}, {problem_with('fences')}",
)


def terminal(**settings: Any) -> Environment:
    return make_environment("terminal", settings)


def some(split: str = "train", number: int = 20, seed: int = 0, **settings: Any) -> list[Task]:
    return list(islice(terminal(**settings).tasks(split, seed), number))


def of_all_kinds(each: int, split: str = "train") -> list[Task]:
    """Tasks of every family and level."""
    return [
        task for family in FAMILIES for level in LEVELS for task in some(split, each, families=family, levels=level)
    ]


async def outcomes(tasks: list[Task], policy: Policy, parallel: int = 4) -> list[Outcome]:
    environment, slots = terminal(levels=LEVELS), asyncio.Semaphore(parallel)

    async def one(task: Task) -> Outcome:
        async with slots:
            return await attempt(environment, task, policy)

    return await asyncio.gather(*map(one, tasks))


@pytest.mark.more
async def test_the_oracle_solves_every_task() -> None:
    tasks = of_all_kinds(6) + of_all_kinds(3, "held-out")
    assert len(tasks) >= 200
    failed = [
        (task.id, task.data["question"], outcome.hint)
        for task, outcome in zip(tasks, await outcomes(tasks, oracle), strict=True)
        if not outcome.solved or outcome.reward != 1
    ]
    assert not failed


@pytest.mark.more
@pytest.mark.parametrize("policy", [does_nothing, destroys_everything])
async def test_doing_nothing_and_destroying_everything_solve_nothing(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episode, "PROCESS_SECONDS", 0.5)
    tasks = of_all_kinds(3)
    for task, outcome in zip(tasks, await outcomes(tasks, policy), strict=True):
        assert not outcome.solved, task.id
        assert outcome.reward <= 0.1, (task.id, outcome)
        assert outcome.hint.endswith(f"Run: {task.data['solution']}")


def test_tasks_depend_on_split_and_seed_alone() -> None:
    assert some(levels=LEVELS) == some(levels=LEVELS)
    assert some() != some(seed=1)
    assert some() != some("held-out")
    json.dumps([task.data for task in some(levels=LEVELS)])


def test_splits_share_no_task() -> None:
    asked = [
        {task.data["key"] or task.data["solution"] for task in some(split, 400, seed, levels=LEVELS)}
        for split in ("train", "held-out")
        for seed in (0, 1)
    ]
    assert not (asked[0] | asked[1]) & (asked[2] | asked[3])
    from random import Random

    for family in FAMILIES:
        for level in LEVELS:
            for kind in range(len(FAMILIES[family][level])):
                for split in ("train", "held-out", "examples"):
                    draw(family, level, split, Random(0), kind)


@pytest.mark.parametrize("level", LEVELS)
def test_all_tasks_of_a_family_have_the_same_short_beginning(level: int) -> None:
    for family in FAMILIES:
        beginnings = {
            json.dumps(task.data["messages"][:-1])
            for split in ("train", "held-out")
            for task in some(split, 5, families=family, levels=level)
        }
        assert len(beginnings) == 1
        if level == 1:
            assert len(beginnings.pop()) < 900  # with JSON's signs; some 150 tokens
    first = some(families="files", levels=level)[0].data["messages"]
    assert [message["role"] for message in first][:3] == ["system", "user", "assistant"]
    assert some(examples=0)[0].data["messages"][1:] == [{"role": "user", "content": some()[0].data["question"]}]


def test_what_a_family_needs_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openclaw_rl.envs.terminal.environment.PATH", "/nowhere")
    assert {task.data["family"] for task in some(number=100)} == FAMILIES.keys() - {"git", "archives", "processes"}
    assert "; without the family git, which needs the program git" in terminal().about  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="The family git of terminal needs the program git"):
        terminal(families="git")


@pytest.mark.parametrize("runtime", ["docker", "podman"])
def test_what_a_family_needs_is_looked_for_in_the_image(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = 'case "$*" in *"command -v"*) echo /usr/bin/tar;; run*) echo sandbox works;; esac'
    (tmp_path / runtime).write_text(f"#!/bin/sh\n{answer}")
    (tmp_path / runtime).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    container = {"sandbox": runtime, "image": "only-tar"}
    assert {task.data["family"] for task in some(number=100, **container)} == FAMILIES.keys() - {"git", "processes"}
    with pytest.raises(ConfigError, match="The family processes of terminal needs the program flock"):
        terminal(families="processes", **container)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"families": "cooking"}, "terminal has no family cooking; there are files, text"),
        ({"levels": 4}, "terminal has no level 4; there are 1, 2, 3"),
        ({"examples": 9}, "examples of terminal is from 0 to 8"),
        ({"seconds": 0}, "seconds of terminal must be a number above 0, not 0"),
        ({"max_output": "x"}, "max_output of terminal must be a number above 0"),
        ({"style": "telepathy"}, "terminal has no style telepathy"),
        ({"sandbox": "tent"}, "There is no sandbox 'tent'"),
        ({"nonsense": 1}, "does not take nonsense"),
    ],
)
def test_a_wrong_setting_is_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        terminal(**settings)


def test_without_a_sandbox_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openclaw_rl.sandbox.kinds.problem_with", lambda name, image="": f"no {name}")
    with pytest.raises(ConfigError, match="no bubblewrap; no fences"):
        terminal()
    assert "NO SANDBOX" in terminal(unsafe_no_sandbox=True).about  # type: ignore[attr-defined]
