"""The environment toolcall: its generators, and what policies of known skill get in it."""

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Message, Task
from openclaw_rl.envs.calls import read_calls
from openclaw_rl.envs.host import checked_messages, checked_step
from openclaw_rl.envs.toolcall.builtin import KINDS, TOOLS
from openclaw_rl.envs.toolcall.environment import LEVELS, ToolCallEnvironment
from support.policies import Policy, attempt, calls, says
from support.properties import examples

EVERYTHING = ToolCallEnvironment(levels=tuple(LEVELS))
#: One argument of each type that the tools take.
SOME_ARGUMENTS = {"operation": "add", "a": 1, "b": 2, "value": 3, "from_unit": "m", "to_unit": "km", "days": 1}


def some_tasks(number: int, split: str = "train", seed: int = 0, env: ToolCallEnvironment = EVERYTHING) -> list[Task]:
    return list(islice(env.tasks(split, seed), number))


def oracle(task: Task) -> Policy:
    """Makes the expected calls one by one, then reads the answer from the last result."""
    expected = [(call["name"], call["arguments"]) for call in task.data["calls"]]

    def answer(messages: Sequence[Message], turn: int) -> Message:
        return calls(expected[turn]) if turn < len(expected) else says(f"Answer: {messages[-1]['content']}")

    return answer


def calls_everything(task: Task) -> Policy:
    """Calls all tools on offer, and the expected ones too, in every turn."""
    names = task.data["tools"]
    expected = [(call["name"], call["arguments"]) for call in task.data["calls"]]
    arguments = {name: TOOLS[name]["function"]["parameters"]["properties"] for name in names}
    some = [(name, {key: SOME_ARGUMENTS.get(key, "x") for key in arguments[name]}) for name in names]
    return lambda messages, turn: calls(*some, *expected) if turn < 3 else says(f"Answer: {task.data['answer']}")


async def test_an_oracle_solves_every_kind_and_level() -> None:
    seen = set()
    for task in [*some_tasks(300), *some_tasks(100, "held-out")]:
        steps, outcome = await attempt(EVERYTHING.open(task), oracle(task))
        assert (outcome.solved, outcome.reward) == (True, 1.0), task
        assert all(step.reward == 1.0 and not step.hint for step in steps), task
        seen.add((task.data["kind"], task.data["level"]))
    assert seen == {(kind, level) for kind in KINDS for level in LEVELS}


async def test_results_are_computed_and_not_taken_from_the_task() -> None:
    tasks = [task for task in some_tasks(200) if task.data["level"] == 4]
    for task in tasks:
        steps, _ = await attempt(EVERYTHING.open(task), oracle(task))
        first, second = steps[0].messages[0]["content"], steps[1].messages[0]["content"]
        needed = task.data["calls"][1]["arguments"].values()
        assert first in [str(value) for value in needed]
        assert second == str(task.data["answer"])


async def test_policies_that_do_nothing_or_everything_solve_nothing() -> None:
    for task in some_tasks(200):
        _, silent = await attempt(EVERYTHING.open(task), lambda messages, turn: says(""))
        assert (silent.solved, silent.reward) == (False, 0.0)
        _, greedy = await attempt(EVERYTHING.open(task), calls_everything(task))
        assert not greedy.solved
        assert greedy.reward < 0.65, task


async def test_a_right_answer_without_calls_counts_nothing() -> None:
    task = next(task for task in some_tasks(50) if task.data["level"] == 2)
    _, outcome = await attempt(EVERYTHING.open(task), lambda messages, turn: says(f"Answer: {task.data['answer']}"))
    assert outcome.reward == 0.0


@given(seed=st.integers(0, 2**32), split=st.sampled_from(["train", "held-out"]))
@examples(20)
def test_the_same_seed_gives_the_same_tasks_and_another_seed_others(seed: int, split: str) -> None:
    tasks = some_tasks(5, split, seed)
    assert tasks == some_tasks(5, split, seed)
    assert [task.id for task in tasks] != [task.id for task in some_tasks(5, split, seed + 1)]
    assert json.loads(json.dumps(tasks[0].data)) == tasks[0].data


@pytest.mark.parametrize("kind", KINDS)
def test_splits_and_examples_share_no_question(kind: str) -> None:
    env = ToolCallEnvironment(kinds=[kind], levels=tuple(LEVELS))

    def asked(messages: Sequence[Message]) -> list[Any]:
        return [message["content"] for message in messages if message["role"] == "user"]

    train, held_out = some_tasks(400, "train", 1, env), some_tasks(400, "held-out", 2, env)
    questions = [{asked(task.data["messages"])[-1] for task in tasks} for tasks in (train, held_out)]
    examples = {text for task in [*train, *held_out] for text in asked(task.data["messages"])[:-1]}
    assert not questions[0] & questions[1]
    assert not (questions[0] | questions[1]) & examples
    first_calls = [{json.dumps(task.data["calls"][0]) for task in tasks} for tasks in (train, held_out)]
    assert not first_calls[0] & first_calls[1]


def test_examples_are_calls_that_the_tools_accept() -> None:
    for task in some_tasks(100):
        tools = EVERYTHING.open(task).tools
        examples = [message for message in task.data["messages"] if message.get("tool_calls")]
        assert len(examples) == 2 * len(task.data["calls"])
        assert not any(call.problem for message in examples for call in read_calls(message, tools))


async def test_the_first_messages_are_few_enough_for_the_driver() -> None:
    env = ToolCallEnvironment(levels=4, examples=8)
    for task in some_tasks(5, env=env):
        assert checked_messages("start", await env.open(task).start())


def test_examples_can_be_left_out() -> None:
    (task,) = some_tasks(1, env=ToolCallEnvironment(examples=0))
    assert [message["role"] for message in task.data["messages"]] == ["system", "user"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kinds": ["cooking"]}, "no kind cooking; there are calculator, lookup, calendar, units"),
        ({"kinds": "units,cooking"}, "no kind cooking"),
        ({"levels": [9]}, "no level 9; there are 1, 2, 3, 4"),
        ({"levels": "two"}, "no level two"),
        ({"levels": []}, "at least one level"),
        ({"examples": -1}, "from 0 to 8, not -1"),
        ({"examples": "two"}, "from 0 to 8, not two"),
        ({"examples": 9}, "from 0 to 8, not 9"),
    ],
)
def test_wrong_options_are_refused_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ToolCallEnvironment(**options)


def test_kinds_and_levels_may_be_given_as_one_value() -> None:
    env = ToolCallEnvironment(kinds="units,lookup", levels=2)
    assert {(task.data["kind"], task.data["level"]) for task in some_tasks(20, env=env)} == {
        ("units", 2),
        ("lookup", 2),
    }


def test_an_unknown_split_is_refused_in_a_sentence() -> None:
    with pytest.raises(ConfigError, match="no split test; the splits are train and held-out"):
        EVERYTHING.tasks("test", 0)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*TOOLS, "unknown", ""])
ARGUMENTS = st.dictionaries(st.sampled_from(["a", "b", "operation", "date", "days", "title", "value"]), JSON) | JSON
ANSWERS = st.lists(
    st.one_of(
        st.text(max_size=30).map(says),
        st.sampled_from(["<tool_call>{", '{"name": "calculate", "arguments": {"a": 1}', "Answer: 5"]).map(says),
        st.lists(st.tuples(NAMES, ARGUMENTS.map(json.dumps) | st.text(max_size=9)), max_size=12).map(
            lambda made: calls(*made)
        ),
    ),
    min_size=1,
)


@pytest.mark.more
@given(index=st.integers(0, 60), answers=ANSWERS, perfect_start=st.booleans())
@examples(150)
async def test_any_answers_end_with_a_reward_within_bounds(
    index: int, answers: list[Message], perfect_start: bool
) -> None:
    task = some_tasks(61)[index]
    first = oracle(task)

    def policy(messages: Sequence[Message], turn: int) -> Message:
        return first(messages, turn) if perfect_start and turn == 0 else answers[turn % len(answers)]

    steps, outcome = await attempt(EVERYTHING.open(task), policy)
    assert 0.0 <= outcome.reward <= 1.0
    assert outcome.solved == (outcome.reward == 1.0)
    assert all(step.reward is not None and 0.0 <= step.reward <= 1.0 for step in map(checked_step, steps))
    assert outcome.solved or any(step.hint for step in steps) or not steps[-1].done
