"""One attempt at a task with tools: runs the calls of each answer, and says what was wrong with them."""

import json
from collections.abc import Sequence
from dataclasses import replace

from openclaw_rl.envs.base import Message, Outcome, Step
from openclaw_rl.envs.calls import ExpectedCall, MadeCall, Toolbox, ToolFailed, answer_text, read_calls
from openclaw_rl.envs.schema import show
from openclaw_rl.envs.toolcall.scoring import AttemptScore, Goal, answers, score

#: Turns and calls that an attempt may make beyond those that its task needs.
SPARE_TURNS, SPARE_CALLS = 2, 4


class ToolEpisode:
    """Runs tools until the policy gives its final answer, or until the calls are made where no answer is expected.

    - Every call gets a result; one that cannot be run gets an error as its result, and the attempt goes on.
    - The attempt ends after a bounded number of turns and calls.
    - Where the task says what is right, each step has a reward from 0 to 1: the share of its calls that were the next
      expected ones, or for a final answer, whether it is right. The outcome's reward, which `scoring` describes, does
      not contain them.
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
        made_before, met_before = len(self.made), self._met
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
