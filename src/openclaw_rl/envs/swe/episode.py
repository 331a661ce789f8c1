"""One attempt at a task in a repository."""

import asyncio
from collections.abc import Sequence

from openclaw_rl.envs.base import Message, Outcome, Step, Tool
from openclaw_rl.envs.calls import MadeCall, ToolFailed, answer_text, read_calls
from openclaw_rl.envs.swe.blocks import MEANT_AS_BLOCK, EditBlock, read_blocks
from openclaw_rl.envs.swe.repository import Repository
from openclaw_rl.envs.swe.scoring import TestGoal, score
from openclaw_rl.envs.swe.suites import TestSuite
from openclaw_rl.envs.swe.tools import TOOLS, RepositoryTools

#: Most calls and edits that one answer may make; further ones are refused.
MAX_CALLS_IN_ANSWER = 8
MALFORMED_BLOCK = f"The edit cannot be read. Write it like this:\n{EditBlock('', 'the lines to find', 'the new lines')}"
NO_EDIT = "The answer has no edit."


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
        self._suite, self._messages, self._goal = suite, messages, goal
        self._single_edit, self._solution = single_edit, solution
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
