"""What episodes of the built-in environments cost without a model, with a policy that knows the solution.

python benchmarks/episodes.py
"""

import asyncio
import json
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from common import machine, sized, table

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Message, Task
from openclaw_rl.envs.registry import make_environment
from openclaw_rl.envs.swe.edit_blocks import EditBlock
from openclaw_rl.envs.terminal.commands import block_of

#: Episodes that run at once → their number.
PARALLEL = sized({1: 40, 4: 80, 8: 80}, {2: 2})
#: Environment and its settings.
MEASURED: list[tuple[str, dict[str, Any]]] = [
    ("terminal", {"levels": [1, 2, 3], "sandbox": "bubblewrap"}),
    ("terminal", {"levels": [1, 2, 3], "sandbox": "fences"}),
    ("swe", {"levels": 1}),
    ("swe", {"levels": 2}),
    ("browser", {"levels": [1, 2, 3]}),
]
HEAD = ("", "episodes at once", "seconds to open", "seconds a step", "episodes a minute")


def answers(name: str, task: Task, episode: Any) -> Iterator[Message]:
    """What solves a task; in a browser, by what the page shows at that moment."""
    solution = task.data["solution"]
    if name == "terminal":
        yield block_of(solution)
    elif name == "browser":
        for kind, role, label, text in solution:
            yield said(f"{kind} {episode.view.number(role, label)} {text}".strip())
    elif task.data["level"] == 1:
        yield from (said(str(EditBlock("", edit["old"], edit["new"]))) for edit in solution)
    else:
        yield call("read_file", path=solution[0]["path"])
        yield from (call("edit", **edit) for edit in solution)
        yield call("run_tests")


def said(text: str) -> Message:
    return {"role": "assistant", "content": text}


def call(name: str, **arguments: str) -> Message:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}


async def play(name: str, environment: Any, task: Task) -> tuple[float, float, int]:
    """Seconds to open an episode, seconds of its steps and of its end, and how many these are."""
    start = time.perf_counter()
    episode = environment.open(task)
    try:
        await episode.start()
        opened = time.perf_counter()
        steps = 1
        for answer in answers(name, task, episode):
            await episode.step(answer)
            steps += 1
        solved = (await episode.outcome()).solved
        ended = time.perf_counter()
    finally:
        await episode.close()
    if not solved:
        raise RuntimeError(f"the solution of {task.id} does not solve it")
    return opened - start, ended - opened, steps


async def measure(name: str, environment: Any) -> list[tuple[object, ...]]:
    tasks = environment.tasks("train", 0)
    await play(name, environment, next(tasks))  # starts the browser
    rows: list[tuple[object, ...]] = []
    for parallel, episodes in PARALLEL.items():
        slots = asyncio.Semaphore(parallel)

        async def timed(task: Task, slots: asyncio.Semaphore = slots) -> tuple[float, float, int]:
            async with slots:
                return await play(name, environment, task)

        start = time.perf_counter()
        times = await asyncio.gather(*map(timed, islice(tasks, episodes)))
        seconds = time.perf_counter() - start
        opening, stepping, steps = (sum(column) for column in zip(*times, strict=True))
        rows.append(
            (parallel, f"{opening / episodes:.3f}", f"{stepping / steps:.3f}", f"{60 * episodes / seconds:.0f}")
        )
    if name == "browser":
        await environment.close()
    return rows


def show_episodes() -> None:
    """Print a table, and why an environment cannot be measured here."""
    rows: list[tuple[object, ...]] = []
    for name, settings in MEASURED:
        try:
            environment = make_environment(name, settings)
        except ConfigError as error:
            print(f"\nEpisodes of {name} were not measured. {error}")
            continue
        about = f"{name}, {', '.join(f'{key} {value}' for key, value in settings.items())}"
        rows += [(about, *row) for row in asyncio.run(measure(name, environment))]
    table(f"Episodes, the solution known ({machine()})", HEAD, rows)


if __name__ == "__main__":
    show_episodes()
