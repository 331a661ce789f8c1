"""BFCL's multi-turn tasks as an environment. Most of these tests need the package bfcl-eval."""

import importlib.util
from itertools import islice
from typing import Any

import pytest

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Message, Task
from openclaw_rl.envs.bfcl import Bfcl, BfclEpisode, read_reference
from openclaw_rl.envs.registry import make_environment
from support.policies import attempt, calls, says

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("bfcl_eval") is None, reason="bfcl-eval is not installed: pip install --no-deps bfcl-eval"
)


def test_a_missing_package_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="needs the package bfcl-eval: pip install --no-deps bfcl-eval"):
        make_environment("bfcl")


@pytest.fixture(scope="module")
def environment() -> Bfcl:
    return Bfcl()


def all_tasks(environment: Bfcl) -> list[Task]:
    return [*islice(environment.tasks("train", 0), 160), *islice(environment.tasks("held-out", 0), 40)]


def reference(episode: BfclEpisode, task: Task) -> list[Message]:
    """The answers that make the reference calls, request by request."""
    answers: list[Message] = []
    for request in task.data["ground_truth"]:
        answers += [calls(read_reference(call, episode._policy_side)) for call in request]
        answers.append(says("Done."))
    return answers


@needs_package
async def test_the_reference_calls_solve_every_task_and_silence_none(environment: Bfcl) -> None:
    tasks = all_tasks(environment)
    assert len({task.id for task in tasks}) == 200
    for task in tasks:
        episode = environment.open(task)
        answers = reference(episode, task)
        steps, outcome = await attempt(episode, lambda messages, turn, a=answers: a[turn])
        assert (outcome.reward, outcome.solved) == (1.0, True), task.id
        assert sum(step.reward or 0 for step in steps) == len(task.data["question"])
        _, silent = await attempt(environment.open(task), lambda messages, turn: says(""))
        assert (silent.reward, silent.solved) == (0.0, False), task.id


@needs_package
async def test_an_attempt_that_stops_early_gets_the_share_of_its_requests(environment: Bfcl) -> None:
    task = next(task for task in all_tasks(environment) if len(task.data["question"]) == 4)
    episode = environment.open(task)
    answers = reference(episode, task)[: len(task.data["ground_truth"][0]) + 1]
    steps, outcome = await attempt(episode, lambda messages, turn: [*answers, says("")][turn])
    assert (outcome.reward, outcome.solved) == (0.25, False)
    assert steps[len(answers) - 1].messages == task.data["question"][1]
    assert steps[-1].hint.startswith("The request is not fulfilled. Call: ")


@needs_package
async def test_nothing_that_the_model_wrote_is_evaluated(environment: Bfcl, tmp_path: Any) -> None:
    task = next(iter(environment.tasks("train", 0)))
    for name in ("__import__('os').system", "_load_scenario", "__init__", "exit"):
        episode = environment.open(task)
        step = await episode.step(calls((name, {"x": f"open('{tmp_path}/made', 'w')"})))
        assert "There is no tool" in step.messages[0]["content"]
    assert not list(tmp_path.iterdir())


@needs_package
async def test_calls_that_would_take_forever_are_refused(environment: Bfcl) -> None:
    task = next(task for task in all_tasks(environment) if "MathAPI" in task.data["involved_classes"])
    step = await environment.open(task).step(calls(("power", {"base": 10, "exponent": 10**9})))
    assert step.messages[0]["content"] == "Error during execution: exponent is at most 1000"


@needs_package
async def test_an_attempt_that_only_calls_ends(environment: Bfcl) -> None:
    task = next(iter(environment.tasks("train", 0)))
    steps, outcome = await attempt(environment.open(task), lambda messages, turn: calls(("none", {})))
    assert (len(steps), outcome.reward) == (11, 0.0)
    steps, outcome = await attempt(environment.open(task), lambda messages, turn: calls(*[("ls", {})] * 100))
    assert (len(steps), outcome.reward) == (1, 0.0)


@needs_package
def test_an_unknown_split_is_one_sentence(environment: Bfcl) -> None:
    with pytest.raises(ConfigError, match="bfcl has no split test; the splits are train and held-out"):
        environment.tasks("test", 0)
