"""The environment of a user's own tools and tasks."""

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from itertools import count
from pathlib import Path
from random import Random

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Task
from openclaw_rl.envs.calls import ExpectedCall
from openclaw_rl.envs.toolcall.episode import ToolEpisode
from openclaw_rl.envs.toolcall.own.config import OPTION, read_tools_config
from openclaw_rl.envs.toolcall.own.tasks import read_tasks
from openclaw_rl.envs.toolcall.own.toolbox import OwnToolbox
from openclaw_rl.envs.toolcall.scoring import Goal
from openclaw_rl.plugins import describe, load_plugin


class OwnTools:
    """The tasks of a configuration, over and over in an order that depends on the seed."""

    def __init__(self, tools_config: str | Path) -> None:
        self._path = Path(tools_config)
        self._config = read_tools_config(self._path)
        names = [tool.function.name for tool in self._config.tools]
        self._tasks = read_tasks(self._config.tasks, names, self._config.system)

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        if not self._tasks.get(split):
            raise ConfigError(f"{OPTION}: {self._config.tasks} has no task of the split {split}.")
        return _shuffled(self._tasks[split], seed)

    def open(self, task: Task) -> ToolEpisode:
        data = task.data
        goal = Goal([ExpectedCall(**call) for call in data["calls"]], data["answer"])
        limits = (max(self._config.max_turns, len(goal.calls) + 1), max(self._config.max_calls, len(goal.calls) + 1))
        return OwnEpisode(task, OwnToolbox(self._config.tools), data["messages"], goal, *limits)


class OwnEpisode(ToolEpisode):
    """An attempt whose task may have a checker of its own."""

    def __init__(
        self,
        task: Task,
        toolbox: OwnToolbox,
        messages: Sequence[Message],
        goal: Goal,
        max_turns: int,
        max_calls: int,
    ) -> None:
        super().__init__(toolbox, messages, goal, max_turns, max_calls)
        self._task = task
        self._own_toolbox = toolbox

    async def outcome(self) -> Outcome:
        if not self._task.data["checker"]:
            return await super().outcome()
        check = load_plugin(self._task.data["checker"], OPTION, ())
        calls = [
            {"name": call.name, "arguments": call.arguments, "error": call.problem or call.failure}
            for call in self.made
        ]
        try:
            # Copies, because the other attempts at the task use the same data.
            reward = float(check(*deepcopy((dict(self._task.data), calls)), self.answer or ""))
        except Exception as error:
            raise EnvFailed(f"The checker {self._task.data['checker']} failed: {describe(error)}.") from error
        if not math.isfinite(reward):
            raise EnvFailed(f"The checker {self._task.data['checker']} gave {reward}, which is not a reward.")
        return Outcome(reward, reward >= 1)

    async def close(self) -> None:
        await self._own_toolbox.close()


def _shuffled(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    for turn in count():
        yield from Random(f"tools {seed} {turn}").sample(tasks, len(tasks))
