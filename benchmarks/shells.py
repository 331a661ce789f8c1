"""What episodes in a terminal cost, with a policy that knows the solution.

python benchmarks/shells.py
"""

import asyncio
import time
from itertools import islice

from common import machine, sized, table

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Environment, Task
from openclaw_rl.envs.terminal.commands import block_of
from openclaw_rl.envs.terminal.environment import make_terminal

#: Episodes that run at once → their number.
PARALLEL = sized({1: 48, 4: 96, 8: 96}, {2: 4})
LEVELS = (1, 2, 3)


def show_shells() -> None:
    """Print seconds a step and episodes a minute for each sandbox that works here."""
    rows = []
    for sandbox in ("bubblewrap", "fences"):
        try:
            environment = make_terminal(sandbox, levels=LEVELS)
        except ConfigError as error:
            print(f"\nEpisodes in a terminal were not measured with {sandbox}. {error}")
            continue
        rows += [(sandbox, *row) for row in asyncio.run(measure(environment))]
    head = ("sandbox", "episodes at once", "seconds to open", "seconds a step", "episodes a minute")
    table(f"Episodes in a terminal, levels 1 to 3, the solution known ({machine()})", head, rows)


async def measure(environment: Environment) -> list[tuple[object, ...]]:
    rows: list[tuple[object, ...]] = []
    for parallel, episodes in PARALLEL.items():
        slots = asyncio.Semaphore(parallel)

        async def play(task: Task, slots: asyncio.Semaphore = slots) -> tuple[float, float]:
            async with slots:
                return await timed(environment, task)

        start = time.perf_counter()
        times = await asyncio.gather(*map(play, islice(environment.tasks("train", 0), episodes)))
        seconds = time.perf_counter() - start
        opening, stepping = (sum(column) / episodes for column in zip(*times, strict=True))
        rows.append((parallel, f"{opening:.3f}", f"{stepping:.3f}", f"{60 * episodes / seconds:.0f}"))
    return rows


async def timed(environment: Environment, task: Task) -> tuple[float, float]:
    """Seconds to open an episode, and of its step."""
    start = time.perf_counter()
    episode = environment.open(task)
    try:
        await episode.start()
        opened = time.perf_counter()
        await episode.step(block_of(task.data["solution"]))
        stepped = time.perf_counter()
        if not (await episode.outcome()).solved:
            raise RuntimeError(f"the solution of {task.id} does not solve it")
    finally:
        await episode.close()
    return opened - start, stepped - opened


if __name__ == "__main__":
    show_shells()
