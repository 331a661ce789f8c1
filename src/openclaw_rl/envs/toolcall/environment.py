"""The environment `toolcall`: generated tasks whose answers are known, without end, or those of a user's tools."""

from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Environment, Message, Task
from openclaw_rl.envs.calls import ExpectedCall, call_message
from openclaw_rl.envs.toolcall.builtin import KINDS, TOOLS, BuiltinToolbox, Draft, normalise, run
from openclaw_rl.envs.toolcall.episode import Goal, ToolEpisode
from openclaw_rl.envs.toolcall.user_tools import UserTools
from openclaw_rl.lab.tasks import checked_examples, checked_split, digest, several, split_with_examples

#: Level → what it asks for.
LEVELS = {
    1: "one call; the attempt ends with it",
    2: "one call, then the answer",
    3: "one call, then the answer, with the tools of all kinds on offer",
    4: "two calls, the second with the result of the first, then the answer, with the tools of all kinds on offer",
}
#: An example has up to six messages, and an episode begins with at most 64.
MAX_EXAMPLES = 8
CALL_ONLY = "Answer the user's question with one tool call."
THEN_ANSWER = (
    "Use the tools to answer the user's question. When you know it, write: Answer: followed by the answer only."
)


def make_toolcall(
    tools_config: str | Path | None = None,
    kinds: str | Sequence[str] | None = None,
    levels: int | Sequence[int] | None = None,
    examples: int | None = None,
) -> Environment:
    """The environment of the given settings. Raises ConfigError."""
    given: dict[str, Any] = {"kinds": kinds, "levels": levels, "examples": examples}
    settings = {name: value for name, value in given.items() if value is not None}
    if tools_config is None:
        return ToolCallEnvironment(**settings)
    if settings:
        raise ConfigError(f"{next(iter(settings))} is for generated tasks; with --tools-config, tasks are in a file.")
    return UserTools(tools_config)


class ToolCallEnvironment:
    """Calculator, look-up, calendar and unit tasks.

    - The same split and seed give the same tasks.
    - A question belongs to one split for all seeds and levels, by a digest of the first call that it needs. So the
      splits share no question, however it is worded, and neither split shares one with the examples.
    - All tasks of a kind and level have the same examples, so the server reads them once and keeps them in its cache.
    - `open` needs only the task: its data holds the question, the examples and all that the tools look up.
    """

    def __init__(
        self,
        kinds: str | Sequence[str] = tuple(KINDS),
        levels: int | Sequence[int] = (1,),
        examples: int = 2,
    ) -> None:
        self._kinds = several("toolcall", "kind", kinds, KINDS)
        self._levels = several("toolcall", "level", levels, LEVELS)
        self._examples = checked_examples("toolcall", examples, MAX_EXAMPLES)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        checked_split("toolcall", split)
        return (self._task(split, Random(f"toolcall {split} {seed} {index}")) for index in count())

    def open(self, task: Task) -> ToolEpisode:
        data = task.data
        goal = Goal([ExpectedCall(**call) for call in data["calls"]], data["answer"], normalise)
        return ToolEpisode(BuiltinToolbox(data["tools"], data["world"]), data["messages"], goal)

    def _task(self, split: str, random: Random) -> Task:
        kind = random.choice(self._kinds)
        level = random.choice(self._levels)
        draft = draw(kind, level, split, random)
        messages: list[Message] = [{"role": "system", "content": CALL_ONLY if level == 1 else THEN_ANSWER}]
        same_for_all = Random(f"toolcall examples {kind} {level}")
        for index in range(self._examples):
            messages += example(draw(kind, level, "examples", same_for_all), level, index)
        data: dict[str, Any] = {
            "kind": kind,
            "level": level,
            "messages": [*messages, {"role": "user", "content": draft.question}],
            "tools": list(TOOLS) if level >= 3 else list(KINDS[kind].tools),
            "calls": [{"name": call.name, "arguments": dict(call.arguments)} for call in draft.calls],
            "answer": None if level == 1 else draft.answer,
            "world": draft.world,
        }
        asked = digest([draft.question, data["calls"], draft.answer])
        return Task(f"toolcall/{split}/{kind}-{level}-{asked:016x}", data)


def draw(kind: str, level: int, split: str, random: Random) -> Draft:
    """A question of a kind that belongs to a split."""
    maker = KINDS[kind].two_calls if level == 4 else KINDS[kind].one_call
    while split_of(draft := maker(random)) != split:
        pass
    return draft


def split_of(draft: Draft) -> str:
    """The split of a question. It depends on the first call alone, which the question determines."""
    first = draft.calls[0]
    return split_with_examples(digest([first.name, dict(normalise(first.name, first.arguments))]))


def example(draft: Draft, level: int, index: int) -> list[Message]:
    """A question and how it is answered, as messages."""
    messages: list[Message] = [{"role": "user", "content": draft.question}]
    for number, call in enumerate(draft.calls):
        id_ = f"example{index}{number}"
        messages.append(call_message(call.name, call.arguments, id_))
        if level > 1:
            messages.append({"role": "tool", "tool_call_id": id_, "content": str(run(draft.world, call))})
    return messages if level == 1 else [*messages, {"role": "assistant", "content": f"Answer: {draft.answer}"}]
