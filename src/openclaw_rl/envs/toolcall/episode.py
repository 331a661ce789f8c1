"""One attempt at a task with tools: runs the calls of each answer, says what was wrong with them, and scores the whole.

The parts of the score, each from 0 to 1; n is the number of expected or of made calls, whichever is larger:

- schema: the share of the made calls that name a known tool and satisfy its schema. 0 without calls.
- arguments: each expected call is paired with a made call of the same tool. A pair counts the share of its arguments
  that are right. The sum over the pairs, divided by n.
- order: the longest sequence of exactly right calls in the right order, divided by n.
- answer: 1 if the final answer is right, else 0.

    calls  = 0.2 · schema + 0.4 · arguments + 0.4 · order
    reward = calls                                    if only calls are expected
    reward = 0.6 · calls + 0.4 · answer · order       if calls and an answer are expected
    reward = answer                                   if only an answer is expected

- An attempt is solved if all its parts are 1: the expected calls, no other call, and the right answer.
- The reward is 1 if the attempt is solved, and below 1 otherwise.
- A superfluous call lowers arguments and order. Where calls are expected, a right answer without them counts nothing.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openclaw_rl.envs.base import Message, Outcome, Step
from openclaw_rl.envs.calls import ExpectedCall, MadeCall, Toolbox, ToolFailed, answer_text, read_calls
from openclaw_rl.lab.schema import same_json, show

#: Turns and calls that an attempt may make beyond those that its task needs.
SPARE_TURNS = 2
SPARE_CALLS = 4


SCHEMA_WEIGHT = 0.2
ARGUMENTS_WEIGHT = 0.4
ORDER_WEIGHT = 0.4
#: The weight of the calls where an answer is expected too.
CALLS_WEIGHT = 0.6

#: A number, with or without separators of thousands.
NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][+-]?\d+)?")
ANSWER_MARK = re.compile(r"answer\s*:", re.IGNORECASE)
#: Signs around an answer that do not belong to it.
DECORATION = " \t\n\r.!*`\"'"

#: Brings the arguments of a tool into one form, where several mean the same.
Normalise = Callable[[str, Mapping[str, Any]], Mapping[str, Any]]


def as_given(_name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments as they are: for tools where only equal arguments mean the same."""
    return arguments


@dataclass(frozen=True, slots=True)
class Goal:
    """What a task expects: calls, a final answer, or both."""

    calls: Sequence[ExpectedCall] = ()
    answer: str | float | None = None
    normalise: Normalise = as_given

    def is_met_by(self, call: MadeCall, expected: ExpectedCall) -> bool:
        """Whether a made call is exactly the expected one."""
        return not call.problem and call.name == expected.name and self.wrong_argument(call, expected) is None

    def wrong_argument(self, call: MadeCall, expected: ExpectedCall) -> str | None:
        """The name of the first argument that differs, for a call of the expected tool; None if they mean the same."""
        made, wanted = self._both(call, expected)
        if made.keys() == wanted.keys() and all(_same_member(made, wanted, name) for name in made):
            return None
        # As they were written, because a normal form may have exchanged them.
        names: list[str] = [*expected.arguments, *call.arguments]
        return next(name for name in names if not _same_member(call.arguments, expected.arguments, name))

    def share_of_arguments(self, call: MadeCall, expected: ExpectedCall) -> float:
        """The share of arguments that are right; 0 for another tool."""
        if call.name != expected.name or not isinstance(call.arguments, dict):
            return 0.0
        made, wanted = self._both(call, expected)
        names = made.keys() | wanted.keys()
        return sum(_same_member(made, wanted, name) for name in names) / len(names) if names else 1.0

    def _both(self, call: MadeCall, expected: ExpectedCall) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return self.normalise(call.name, call.arguments), self.normalise(expected.name, expected.arguments)


@dataclass(frozen=True, slots=True)
class AttemptScore:
    """The parts of an attempt's reward; None for a part that the task does not have."""

    schema: float | None
    arguments: float | None
    order: float | None
    answer: float | None

    @property
    def solved(self) -> bool:
        return all(part in (None, 1.0) for part in (self.schema, self.arguments, self.order, self.answer))

    @property
    def reward(self) -> float:
        if self.solved:
            return 1.0  # exactly, whatever the weights add up to in floating point
        if self.schema is None or self.arguments is None or self.order is None:
            return self.answer or 0.0
        calls = SCHEMA_WEIGHT * self.schema + ARGUMENTS_WEIGHT * self.arguments + ORDER_WEIGHT * self.order
        if self.answer is None:
            return calls
        return CALLS_WEIGHT * calls + (1 - CALLS_WEIGHT) * self.answer * self.order


class ToolEpisode:
    """Runs tools until the policy gives its final answer, or until the calls are made where no answer is expected.

    - Every call gets a result; one that cannot be run gets an error as its result, and the attempt goes on.
    - The attempt ends after a bounded number of turns and calls.
    - Where the task says what is right, each step has a reward from 0 to 1: the share of its calls that were the next
      expected ones, or for a final answer, whether it is right. The outcome's reward, as described above, does not
      contain them.
    - Each step that was not right has a hint: what was wrong, and what to do instead.
    """

    def __init__(
        self, toolbox: Toolbox, messages: Sequence[Message], goal: Goal, max_turns: int = 0, max_calls: int = 0
    ) -> None:
        self.tools = toolbox.tools
        self._toolbox = toolbox
        self._messages = messages
        self._goal = goal
        self._max_turns = max_turns or len(goal.calls) + 1 + SPARE_TURNS
        self._max_calls = max_calls or len(goal.calls) + SPARE_CALLS
        self.made: list[MadeCall] = []
        self._met = 0
        self._turns = 0
        self.answer: str | None = None

    async def start(self) -> Sequence[Message]:
        return self._messages

    async def step(self, answer: Message) -> Step:
        self._turns += 1
        calls = read_calls(answer, self.tools)
        if not calls:
            return self._end(answer_text(answer))
        # Before the calls are run: running them changes which call is the next.
        hint = self._hint_for_calls(calls)
        made_before = len(self.made)
        met_before = self._met
        allowed = self._max_calls - made_before
        messages = [await self._run(call) for call in calls[:allowed]]
        if not self._goal.calls:
            problems = (call.problem or call.failure for call in self.made[made_before:])
            hint = next(filter(None, problems), "")
        self.made += calls[allowed:]
        done = len(calls) >= allowed or self._turns >= self._max_turns
        if self._goal.calls and self._goal.answer is None:
            # The attempt is over once each expected call had its turn, or a call was wrong.
            done = done or self._met == len(self._goal.calls) or bool(hint)
        reward = (self._met - met_before) / len(calls) if self._goal.calls else None
        return Step(messages, reward, hint, done)

    async def outcome(self) -> Outcome:
        result = self.score()
        return Outcome(result.reward, result.solved)

    async def close(self) -> None:
        """Nothing to close."""

    def score(self) -> AttemptScore:
        """The parts of the reward so far."""
        return score(self._goal, self.made, self.answer)

    def _end(self, text: str) -> Step:
        """The final answer: a turn without calls."""
        self.answer = text
        if missing := self._next_call():
            return Step(reward=0.0, hint=f"Do not answer in words yet. Call a tool: {missing}", done=True)
        if self._goal.answer is None:
            return Step(reward=0.0 if self._goal.calls else None, done=True)
        right = answers(text, self._goal.answer)
        hint = "" if right else f"The final answer is wrong. Write: Answer: {self._goal.answer}"
        return Step(reward=float(right), hint=hint, done=True)

    async def _run(self, call: MadeCall) -> Message:
        """Run a call, or say why it cannot be run; record it either way."""
        expected = self._next_call()
        if expected is not None and self._goal.is_met_by(call, expected):
            self._met += 1
        if call.problem:
            self.made.append(call)
            return _error(call, call.problem)
        try:
            result = await self._toolbox.run(call.name, call.arguments)
        except ToolFailed as error:
            self.made.append(replace(call, failure=str(error)))
            return _error(call, str(error))
        self.made.append(call)
        return {"role": "tool", "tool_call_id": call.id, "content": result}

    def _next_call(self) -> ExpectedCall | None:
        """The expected call that comes next; None if all are made."""
        return self._goal.calls[self._met] if self._met < len(self._goal.calls) else None

    def _hint_for_calls(self, calls: Sequence[MadeCall]) -> str:
        """What was wrong with the calls of an answer, and what to do instead; empty if they are as expected."""
        left = self._goal.calls[self._met :]
        if not self._goal.calls:
            return ""
        if not left:
            finish = f" Write: Answer: {self._goal.answer}" if self._goal.answer is not None else ""
            return f"Make no more calls.{finish}"
        for call, expected in zip(calls, left, strict=False):
            if wrong := self._what_is_wrong(call, expected):
                return f"{wrong} Call: {expected}"
        needed = "one call" if len(left) == 1 else f"{len(left)} calls"
        return f"Make only {needed}." if len(calls) > len(left) else ""

    def _what_is_wrong(self, call: MadeCall, expected: ExpectedCall) -> str:
        if call.problem:
            return call.problem
        if call.name != expected.name:
            return f"{call.name} is the wrong tool here."
        name = self._goal.wrong_argument(call, expected)
        if name is None:
            return ""
        if name not in expected.arguments:
            return f"Leave out {name!r}."
        return f"The argument {name!r} must be {show(expected.arguments[name])}, not {show(call.arguments.get(name))}."


def _error(call: MadeCall, problem: str) -> Message:
    """What the model is told about a call that could not be run."""
    if not call.name:  # text that was meant as a call
        return {"role": "user", "content": problem}
    return {"role": "tool", "tool_call_id": call.id, "content": json.dumps({"error": problem}, ensure_ascii=False)}


def score(goal: Goal, made: Sequence[MadeCall], answer: str | None) -> AttemptScore:
    """Score an attempt by its calls and its final answer, which is None if it gave none."""
    right = None if goal.answer is None else float(answer is not None and answers(answer, goal.answer))
    if not goal.calls:
        return AttemptScore(None, None, None, right)
    n = max(len(made), len(goal.calls))
    schema = sum(not call.problem for call in made) / len(made) if made else 0.0
    return AttemptScore(schema, _paired_arguments(goal, made) / n, _longest_in_order(goal, made) / n, right)


def answers(text: str, expected: str | float) -> bool:
    """Whether a final answer is right. It is the text after the last "Answer:", or all of it.

    A number must be the only number there. Text must be equal, but for case and signs around it.
    """
    stated = ANSWER_MARK.split(text)[-1]
    if isinstance(expected, str):
        return stated.strip(DECORATION).casefold() == expected.strip(DECORATION).casefold()
    numbers = NUMBER.findall(stated)
    return len(numbers) == 1 and same_json(float(numbers[0].replace(",", "")), float(expected))


def _same_member(made: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> bool:
    return name in made and name in wanted and same_json(made[name], wanted[name])


def _paired_arguments(goal: Goal, made: Sequence[MadeCall]) -> float:
    """Pair each expected call with the best of the made calls that are left; the sum of their shares."""
    left = list(made)
    total = 0.0
    for expected in goal.calls:
        shares = [goal.share_of_arguments(call, expected) for call in left]
        if shares and (best := max(shares)) > 0:
            total += best
            del left[shares.index(best)]
    return total


def _longest_in_order(goal: Goal, made: Sequence[MadeCall]) -> int:
    """The length of the longest common subsequence of expected and made calls."""
    row = [0] * (len(made) + 1)
    for expected in goal.calls:
        before = row
        row = [0]
        for index, call in enumerate(made):
            longer = before[index] + 1 if goal.is_met_by(call, expected) else 0
            row.append(max(longer, before[index + 1], row[index]))
    return row[-1]
