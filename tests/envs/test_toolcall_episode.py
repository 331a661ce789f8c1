"""What an attempt with tools is told about its mistakes, and how its parts are scored."""

import pytest

from openclaw_rl.envs.base import Message, Step
from openclaw_rl.envs.calls import ExpectedCall
from openclaw_rl.envs.host import checked_step
from openclaw_rl.envs.toolcall.builtin import BuiltinToolbox, normalise
from openclaw_rl.envs.toolcall.episode import Goal, ToolEpisode, answers
from support.policies import attempt, calls, says

PRODUCT = ExpectedCall("calculate", {"operation": "multiply", "a": 12, "b": 34})
SUM = ExpectedCall("calculate", {"operation": "add", "a": 408, "b": 2})
RIGHT = ("calculate", PRODUCT.arguments)
SHOW = 'Call: {"name": "calculate", "arguments": {"operation": "multiply", "a": 12, "b": 34}}'


def episode(*expected: ExpectedCall, answer: float | None = None) -> ToolEpisode:
    toolbox = BuiltinToolbox(["calculate", "convert"], {})
    return ToolEpisode(toolbox, [{"role": "user", "content": "12 times 34?"}], Goal(expected, answer, normalise))


def product(**changes: object) -> tuple[str, object]:
    return "calculate", {**PRODUCT.arguments, **changes}


@pytest.mark.parametrize(
    ("answer", "hint", "reward"),
    [
        (says("It is 408."), "Do not answer in words yet. Call a tool: " + SHOW.removeprefix("Call: "), 0.0),
        (calls(("times", {"a": 1})), f"There is no tool times; the tools are calculate, convert. {SHOW}", 0.0),
        (calls(("calculate", '{"a": 12,')), f"The arguments of calculate are not valid JSON. {SHOW}", 0.0),
        *(
            (calls(("calculate", f'{{"a": {wrong}}}')), f"The arguments of calculate are not valid JSON. {SHOW}", 0.0)
            for wrong in ("1e999", "NaN", "-Infinity", r'"\ud800"', "1" * 5000)
        ),
        (calls(product(b=10**400)), f"The argument 'b' must be 34, not 1{'0' * 59}…. {SHOW}", 0.2 + 0.4 * 2 / 3),
        (calls(("calculate", "[12]")), f"The arguments of calculate are not a JSON object. {SHOW}", 0.0),
        (
            says('<tool_call>{"name": "calculate", "arguments": {"a": 12'),
            f"The tool call is not valid JSON with a name and arguments. {SHOW}",
            0.0,
        ),
        (calls(product(a="12")), f"'a' must be of type number, not \"12\". {SHOW}", 0.4 * 2 / 3),
        (calls(product(b=35)), f"The argument 'b' must be 34, not 35. {SHOW}", 0.2 + 0.4 * 2 / 3),
        (
            calls(product(c=1)),
            f"There is no 'c' in the arguments of calculate; it has 'operation', 'a', 'b'. {SHOW}",
            0.3,
        ),
        (
            calls(("convert", {"value": 1, "from_unit": "m", "to_unit": "km"})),
            f"convert is the wrong tool here. {SHOW}",
            0.2,
        ),
        (calls(RIGHT, RIGHT), "Make only one call.", 0.2 + 0.4 / 2 + 0.4 / 2),
        (calls(RIGHT), "", 1.0),
        (calls(product(a=34, b=12)), "", 1.0),
    ],
)
async def test_one_call_its_hint_and_its_reward(answer: Message, hint: str, reward: float) -> None:
    steps, outcome = await attempt(episode(PRODUCT), lambda messages, turn: answer)
    assert len(steps) == 1
    assert steps[0].hint == hint
    assert outcome.reward == pytest.approx(reward)
    assert outcome.solved == (reward == 1.0)


async def test_the_hint_names_the_argument_that_is_wrong_as_it_was_written() -> None:
    expected = ExpectedCall("calculate", {"operation": "add", "a": 34, "b": 12})
    answer = calls(("calculate", {"operation": "add", "a": 34, "b": 50}))
    steps, _ = await attempt(episode(expected), lambda messages, turn: answer)
    assert steps[0].hint.startswith("The argument 'b' must be 12, not 50. Call: ")


async def test_steps_have_no_reward_where_the_task_does_not_say_what_is_right() -> None:
    steps, _ = await attempt(episode(), lambda messages, turn: calls(RIGHT) if turn == 0 else says("Done."))
    assert [step.reward for step in steps] == [None, None]


async def run(told: ToolEpisode, *said: Message) -> tuple[list[Step], float]:
    steps, outcome = await attempt(told, lambda messages, turn: said[turn])
    return steps, outcome.reward


async def test_a_wrong_call_can_be_mended_but_costs() -> None:
    steps, reward = await run(episode(PRODUCT, answer=408), calls(product(b=0)), calls(RIGHT), says("Answer: 408"))
    assert [step.reward for step in steps] == [0.0, 1.0, 1.0]
    assert [bool(step.hint) for step in steps] == [True, False, False]
    # Two calls, one of them right: schema 1, arguments 1/2, order 1/2.
    assert reward == pytest.approx(0.6 * (0.2 + 0.4 / 2 + 0.4 / 2) + 0.4 / 2)


async def test_calls_in_the_wrong_order_lose_the_order_only() -> None:
    made = calls(("calculate", SUM.arguments), RIGHT)
    _, reward = await run(episode(PRODUCT, SUM, answer=410), made, says("Answer: 410"))
    assert reward == pytest.approx(0.6 * (0.2 + 0.4 + 0.4 / 2) + 0.4 / 2)


async def test_a_wrong_answer_and_a_needless_call_get_a_hint_with_the_answer() -> None:
    steps, _ = await run(episode(PRODUCT, answer=408), calls(RIGHT), calls(RIGHT), says("Answer: 12"))
    assert [step.hint for step in steps] == [
        "",
        "Make no more calls. Write: Answer: 408",
        "The final answer is wrong. Write: Answer: 408",
    ]


async def test_errors_are_results_and_the_attempt_goes_on() -> None:
    made = calls(("times", {}), ("calculate", {"operation": "divide", "a": 1, "b": 0}))
    steps, _ = await run(episode(PRODUCT, answer=408), made, says("Answer: 1"))
    assert [message["content"] for message in steps[0].messages] == [
        '{"error": "There is no tool times; the tools are calculate, convert."}',
        '{"error": "Nothing can be divided by 0."}',
    ]
    assert [message["tool_call_id"] for message in steps[0].messages] == ["call0", "call1"]


async def test_text_that_utf8_does_not_have_is_replaced() -> None:
    steps, _ = await run(episode(PRODUCT, answer=408), calls(("\ud800", {})), says("Answer: 1"))
    step = checked_step(steps[0])
    assert step.hint.startswith("There is no tool ?;")
    assert "There is no tool ?;" in step.messages[0]["content"]


async def test_an_attempt_that_only_calls_is_ended() -> None:
    steps, outcome = await attempt(episode(PRODUCT, answer=408), lambda messages, turn: calls(RIGHT))
    assert len(steps) == 4
    assert not outcome.solved
    steps, outcome = await attempt(episode(PRODUCT, answer=408), lambda messages, turn: calls(*[RIGHT] * 1000))
    assert (len(steps), len(steps[0].messages)) == (1, 5)
    assert outcome.reward < 0.13


async def test_the_outcome_of_an_unfinished_attempt_counts_what_was_done() -> None:
    unfinished = episode(PRODUCT, answer=408)
    assert (await unfinished.outcome()).reward == 0.0
    await unfinished.step(calls(RIGHT))
    outcome = await unfinished.outcome()
    assert (outcome.reward, outcome.solved) == (pytest.approx(0.6), False)


@pytest.mark.parametrize(
    ("text", "expected", "right"),
    [
        ("Answer: 408", 408, True),
        ("answer: **408**.", 408, True),
        ("408", 408, True),
        ("12 times 34 is… Answer: 408", 408, True),
        ("Answer: 1,408 km", 1408, True),
        ("Answer: 408 or 409", 408, False),
        ("12 times 34 is 408", 408, False),
        ("Answer: -408", 408, False),
        ("Answer: 19.3121", 19.3121, True),
        ("Answer: 19.3", 19.3121, False),
        ("Answer: 1e999", 408, False),
        ("Answer: Friday.", "Friday", True),
        ("Answer: Friday or Monday", "Friday", False),
        ("Answer: friday", "Friday", True),
        ("Answer: 2029-08-10", "2029-08-10", True),
        ("", 408, False),
    ],
)
def test_which_answers_are_right(text: str, expected: str | float, right: bool) -> None:
    assert answers(text, expected) == right
