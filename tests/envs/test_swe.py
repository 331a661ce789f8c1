"""The environment swe: its generated tasks, and what policies get for them."""

import asyncio
import json
from itertools import islice

import pytest

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Task
from openclaw_rl.envs.host import checked_messages, checked_tools
from openclaw_rl.envs.registry import make_environment
from openclaw_rl.envs.swe.assert_tests import prepare
from openclaw_rl.envs.swe.bugs import KINDS, bugs_in
from openclaw_rl.envs.swe.edit_blocks import read_blocks
from openclaw_rl.envs.swe.environment import LEVELS, PlantedBugs, make_swe
from openclaw_rl.envs.swe.packages import packages_of, read_packages
from openclaw_rl.envs.swe.planting import try_tests
from support.swe_policies import Policy, destroys_everything, does_nothing, needs_sandbox, oracle, play, text

pytestmark = needs_sandbox

#: Episodes at once.
AT_ONCE = 3


def tasks(number: int, split: str = "train", seed: int = 0, **settings: object) -> list[Task]:
    return list(islice(make_swe(**settings).tasks(split, seed), number))


async def solved_and_rewards(number: int, policy: Policy, **settings: object) -> tuple[int, list[float]]:
    environment = make_swe(**settings)  # type: ignore[arg-type]
    assert isinstance(environment, PlantedBugs)
    slots = asyncio.Semaphore(AT_ONCE)

    async def one(task: Task) -> tuple[bool, float]:
        async with slots:
            outcome = await play(environment, task, policy)
            return outcome.solved, outcome.reward

    half = number // 2
    drawn = [*islice(environment.tasks("train", 1), half), *islice(environment.tasks("held-out", 1), number - half)]
    results = await asyncio.gather(*map(one, drawn))
    return sum(solved for solved, _ in results), [reward for _, reward in results]


class TestPackages:
    def test_all_tests_of_all_packages_pass(self) -> None:
        for package in read_packages().values():
            results = try_tests(package.sources, prepare(package.tests))
            assert results
            assert [result.problem for result in results.values() if not result.passed] == []

    def test_every_bug_comes_with_the_edit_that_mends_it(self) -> None:
        bugs = [
            (text, bug)
            for package in read_packages().values()
            for text in package.sources.values()
            for bug in bugs_in(text)
        ]
        assert len(bugs) > 800
        for right, bug in bugs:
            assert bug.text != right
            assert bug.text.count(bug.old) == 1
            assert bug.text.replace(bug.old, bug.new) == right
        assert {bug.kind for _, bug in bugs} == set(KINDS)

    def test_a_package_is_in_one_split(self) -> None:
        train, held_out, examples = (
            {p.name for p in packages_of(split)} for split in ("train", "held-out", "examples")
        )
        assert len(train) >= 12
        assert len(held_out) >= 3
        assert not train & held_out
        assert not (train | held_out) & examples

    def test_a_bug_that_makes_a_loop_endless_is_noticed(self) -> None:
        tests = prepare(
            {"test_a.py": "from a import f\ndef test_f():\n    assert f() == 1\ndef test_g():\n    assert f() == 1\n"}
        )
        assert try_tests({"a.py": "def f():\n    while True:\n        pass\n"}, tests) is None


class TestTasks:
    @pytest.mark.more
    @pytest.mark.parametrize("level", LEVELS)
    def test_the_same_seed_gives_the_same_tasks(self, level: int) -> None:
        assert tasks(6, seed=3, levels=level) == tasks(6, seed=3, levels=level)
        assert tasks(6, seed=3, levels=level) != tasks(6, seed=4, levels=level)

    @pytest.mark.more
    def test_the_splits_share_no_task(self) -> None:
        for level in LEVELS:
            train, held_out = (
                {task.id.split("/")[-1] for task in tasks(40, split, levels=level)} for split in ("train", "held-out")
            )
            assert len(train) > 20
            assert not train & held_out

    def test_a_task_is_json_and_its_messages_can_be_sent(self) -> None:
        for level in LEVELS:
            task = tasks(1, levels=level)[0]
            again = Task(task.id, json.loads(json.dumps(task.data)))
            episode = make_swe().open(again)
            assert checked_messages("start", task.data["messages"])
            assert bool(checked_tools(episode.tools)) == (level > 1)

    def test_neither_the_solution_nor_the_hidden_tests_are_shown(self) -> None:
        for task in tasks(30, levels=(1, 2, 3)):
            shown = json.dumps([task.data["messages"], task.data["files"]])
            assert "_more" not in shown
            assert any("_more" in text for text in task.data["tests"].values())
            for edit in task.data["solution"]:
                assert task.data["files"][edit["path"]].count(edit["old"]) == 1

    def test_short_functions_do_not_run_out(self) -> None:
        drawn = tasks(150, "held-out", kinds="missing")
        assert len({task.id for task in drawn}) > 75
        for task in drawn[:5]:
            (edit,) = task.data["solution"]
            assert edit["old"] in task.data["messages"][-1]["content"]

    def test_level_1_shows_how_an_edit_is_written_as_a_block(self) -> None:
        for message in (tasks(1)[0].data["messages"][number] for number in (2, 4)):
            (edit,) = read_blocks(message["content"], [])
            assert message["content"] == str(edit)
            assert message["content"].startswith("<<<<<<< SEARCH\n")

    def test_all_tasks_of_a_kind_begin_with_the_same_examples(self) -> None:
        one, other = tasks(2, kinds="operator")
        assert one.data["messages"][:-1] == other.data["messages"][:-1]
        assert len(one.data["messages"]) == 6
        assert one.data["messages"][1] != one.data["messages"][3]
        assert len(tasks(1, examples=0)[0].data["messages"]) == 2

    @pytest.mark.parametrize(
        "settings", [{"levels": 4}, {"kinds": "typo"}, {"examples": 7}, {"examples": -1}, {"levels": []}]
    )
    def test_wrong_settings_are_refused_in_a_sentence(self, settings: dict[str, object]) -> None:
        with pytest.raises(ConfigError, match="swe"):
            make_environment("swe", settings)

    def test_an_unknown_split_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="no split test"):
            make_swe().tasks("test", 0)


class TestPolicies:
    @pytest.mark.more
    @pytest.mark.parametrize("level", LEVELS)
    async def test_the_oracle_solves_every_task(self, level: int) -> None:
        solved, rewards = await solved_and_rewards(68, oracle, levels=level)
        assert solved == 68
        assert set(rewards) == {1.0}

    async def test_doing_nothing_solves_none(self) -> None:
        solved, rewards = await solved_and_rewards(60, does_nothing, levels=(1, 2, 3))
        assert solved == 0
        assert set(rewards) == {0.0}

    @pytest.mark.more
    async def test_destroying_everything_solves_none(self) -> None:
        solved, rewards = await solved_and_rewards(30, destroys_everything, levels=(1, 2, 3))
        assert solved == 0
        assert set(rewards) == {0.0}

    async def test_an_attempt_that_is_not_solved_has_the_solution_as_its_hint(self) -> None:
        environment = make_swe()
        (task,) = islice(environment.tasks("train", 0), 1)
        episode = environment.open(task)
        step = await episode.step(text("I do not know."))
        assert step.done
        outcome = await episode.outcome()
        assert step.hint == "The answer has no edit."
        assert task.data["solution"][0]["new"] in outcome.hint
