"""Measures what episodes in repositories cost without a model: seconds a step and episodes a minute, with an oracle.

python benchmarks/repositories.py
"""

import asyncio
import json
import time
from itertools import islice

from common import machine, sized, table

from openclaw_rl.envs.base import Message, Task
from openclaw_rl.envs.swe.edit_blocks import EditBlock
from openclaw_rl.envs.swe.environment import PlantedBugs, make_swe

EPISODES = sized(40, 2)
PARALLEL = sized((1, 4, 8), (2,))


def answers(task: Task) -> list[Message]:
    """What mends the bugs: a block at level 1, calls and a run of the tests at level 2."""
    edits = task.data["solution"]
    if task.data["level"] == 1:
        return [{"role": "assistant", "content": str(EditBlock("", edit["old"], edit["new"]))} for edit in edits]
    return [call("read_file", path=edits[0]["path"]), *(call("edit", **edit) for edit in edits), call("run_tests")]


def call(name: str, **arguments: str) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


async def measure(environment: PlantedBugs, parallel: int) -> tuple[float, float]:
    """Seconds a step, with the end of the episode as one, and episodes a minute."""
    slots = asyncio.Semaphore(parallel)
    durations: list[float] = []

    async def timed(work: object) -> None:
        started = time.perf_counter()
        await work  # type: ignore[misc]
        durations.append(time.perf_counter() - started)

    async def play(task: Task) -> None:
        async with slots:
            episode = environment.open(task)
            for answer in answers(task):
                await timed(episode.step(answer))
            await timed(episode.outcome())

    tasks = list(islice(environment.tasks("train", 0), EPISODES))
    started = time.perf_counter()
    await asyncio.gather(*map(play, tasks))
    return sum(durations) / len(durations), 60 * len(tasks) / (time.perf_counter() - started)


def show_repositories() -> None:
    rows = []
    for level in (1, 2):
        environment = make_swe(levels=level)
        assert isinstance(environment, PlantedBugs)
        for parallel in PARALLEL:
            step, minute = asyncio.run(measure(environment, parallel))
            rows.append((f"level {level}, {parallel} at once", f"{step:.3f}", f"{minute:.0f}"))
    table(f"swe, {environment.about} ({machine()})", ("", "seconds a step", "episodes a minute"), rows)


if __name__ == "__main__":
    show_repositories()
