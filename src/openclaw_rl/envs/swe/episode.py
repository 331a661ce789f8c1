"""One attempt at a task in a repository. Its score: by the tests that have to pass, and those that must not break.

fixed  = share of the tests that failed because of the bug and pass now
kept   = share of the tests that passed in spite of the bug and still pass; 0 if the code cannot be loaded
reward = 1                                   if all tests pass: solved
reward = 0.1 · kept + 0.5 · fixed · kept     if a source was changed
reward = 0                                   if none was changed
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from openclaw_rl.envs.base import Message, Outcome, Step, Tool
from openclaw_rl.envs.calls import MadeCall, ToolFailed, answer_text, read_calls
from openclaw_rl.envs.swe.edit_blocks import MEANT_AS_BLOCK, EditBlock, read_blocks
from openclaw_rl.envs.swe.repository import Repository
from openclaw_rl.envs.swe.suites import TestResult, TestSuite
from openclaw_rl.envs.swe.tools import TOOLS, RepositoryTools

#: Most calls and edits that one answer may make; further ones are refused.
MAX_CALLS_IN_ANSWER = 8
MALFORMED_BLOCK = f"The edit cannot be read. Write it like this:\n{EditBlock('', 'the lines to find', 'the new lines')}"
NO_EDIT = "The answer has no edit."
CHANGED_WEIGHT = 0.1
FIXED_WEIGHT = 0.5


@dataclass(frozen=True, slots=True)
class TestGoal:
    """The tests that decide about an attempt, by their ids."""

    must_pass: Collection[str]
    must_keep: Collection[str]


class RepositoryEpisode:
    """Runs the tools and edits of each answer until the policy is done, then judges the repository.

    - An answer may call tools, or have search/replace blocks in its text. Each call and each block gets a result.
    - The attempt ends with an answer that has neither; with `single_edit`, with the first answer.
    - Only edits of sources count at the end; see `repository`. The tests are the original ones.
    - Whatever the policy writes is refused or scored. EnvFailed means that the sandbox is broken.
    - The hint of a step is the first refusal in it; that of the outcome is what is still wrong.
    """

    def __init__(
        self,
        repository: Repository,
        suite: TestSuite,
        messages: Sequence[Message],
        goal: TestGoal,
        *,
        single_edit: bool = False,
        solution: str = "",
    ) -> None:
        self.tools: Sequence[Tool] = () if single_edit else TOOLS
        self.repository = repository
        self._toolbox = RepositoryTools(repository, suite)
        self._suite = suite
        self._messages = messages
        self._goal = goal
        self._single_edit = single_edit
        self._solution = solution
        self._refusal = ""

    async def start(self) -> Sequence[Message]:
        return self._messages

    async def step(self, answer: Message) -> Step:
        self._refusal = ""
        if calls := read_calls(answer, TOOLS):
            messages = [await self._run(call, index) for index, call in enumerate(calls)]
        else:
            messages = await asyncio.to_thread(self._apply_blocks, answer_text(answer))
        return Step(messages, hint=self._refusal, done=self._single_edit or not messages)

    async def outcome(self) -> Outcome:
        changed = await asyncio.to_thread(self._changed)
        outcome = score(self._goal, await self._suite.judge(self.repository) if changed else {}, changed=changed)
        hint = " ".join(filter(None, [self._refusal, outcome.hint, self._solution])) if not outcome.solved else ""
        return Outcome(outcome.reward, outcome.solved, hint)

    async def close(self) -> None:
        """Nothing to close: every run of tests has a folder of its own, which ends with it."""

    def _changed(self) -> bool:
        edits = self.repository.source_edits()
        return any(text != self.repository.tree.read(path) for path, text in edits.items())

    async def _run(self, call: MadeCall, index: int) -> Message:
        """The message with a call's result, or with the reason for which it was not run."""
        try:
            if index >= MAX_CALLS_IN_ANSWER:
                raise ToolFailed(f"An answer may make at most {MAX_CALLS_IN_ANSWER} calls.")
            if call.problem:
                raise ToolFailed(call.problem)
            content = await self._toolbox.run(call.name, call.arguments)
        except ToolFailed as error:
            content = self._refuse(str(error))
        if not call.name:  # text that was meant as a call
            return {"role": "user", "content": content}
        return {"role": "tool", "tool_call_id": call.id, "content": content}

    def _apply_blocks(self, text: str) -> list[Message]:
        """Apply the search/replace blocks in an answer; no message if it has none."""
        blocks = read_blocks(text, self.repository.paths())
        if not blocks and MEANT_AS_BLOCK.search(text):
            return [{"role": "user", "content": self._refuse(MALFORMED_BLOCK)}]
        if not blocks and self._single_edit:
            self._refuse(NO_EDIT)
        results = [self._apply(block) for block in blocks[:MAX_CALLS_IN_ANSWER]]
        return [{"role": "user", "content": "\n".join(results)}] if results else []

    def _apply(self, block: EditBlock) -> str:
        try:
            return self.repository.edit(block.path or self._only_source(), block.old, block.new)
        except ToolFailed as error:
            return self._refuse(str(error))

    def _only_source(self) -> str:
        sources = self.repository.sources()
        if len(sources) != 1:
            raise ToolFailed("Write the path of the file in the line above the edit.")
        return sources[0]

    def _refuse(self, reason: str) -> str:
        self._refusal = self._refusal or reason
        return f"Error: {reason}"


def score(goal: TestGoal, results: Mapping[str, TestResult], *, changed: bool) -> Outcome:
    """The outcome of an attempt. Its hint is the first problem."""
    if not changed:
        return Outcome(0.0, solved=False, hint="No source was changed.")
    fixed = [passed(results, id_) for id_ in goal.must_pass]
    kept = [passed(results, id_) for id_ in goal.must_keep]
    if all(fixed) and all(kept):
        return Outcome(1.0, solved=True)
    wrong = next((id_ for id_ in [*goal.must_pass, *goal.must_keep] if not passed(results, id_)), "")
    hint = results[wrong].problem if wrong in results else "The tests could not be run."
    loaded = any(result.loaded for result in results.values())
    kept_share = float(loaded) * (sum(kept) / len(kept) if kept else 1.0)
    reward = CHANGED_WEIGHT * kept_share + FIXED_WEIGHT * kept_share * sum(fixed) / len(fixed)
    return Outcome(reward, solved=False, hint=hint)


def passed(results: Mapping[str, TestResult], id_: str) -> bool:
    return id_ in results and results[id_].passed
