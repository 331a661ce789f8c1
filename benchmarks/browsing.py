"""What episodes in a real browser cost, with a policy that knows the solution."""

import asyncio
import time
from itertools import islice

from common import machine, sized, table

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Task
from openclaw_rl.envs.browser.environment import BrowserEnvironment, make_browser

#: Episodes that run at once → their number.
PARALLEL = sized({1: 16, 4: 32, 8: 48}, {2: 2})
LEVELS = [1, 2, 3]


def show_browser() -> None:
    """Print seconds a step and episodes a minute, or why they cannot be measured here."""
    try:
        env = make_browser(levels=LEVELS)
    except ConfigError as error:
        print(f"\nEpisodes in a browser were not measured. {error}")
        return
    rows = asyncio.run(measure(env))
    head = ("episodes at once", "seconds to open", "seconds a step", "episodes a minute")
    table(f"Episodes in a browser, levels 1 to 3, the solution known ({machine()})", head, rows)


async def measure(env: BrowserEnvironment) -> list[tuple[object, ...]]:
    tasks = env.tasks("train", 0)
    await play(env, next(tasks))  # starts the browser
    rows: list[tuple[object, ...]] = []
    for parallel, episodes in PARALLEL.items():
        slots = asyncio.Semaphore(parallel)

        async def timed(task: Task, slots: asyncio.Semaphore = slots) -> tuple[float, float, int]:
            async with slots:
                return await play(env, task)

        start = time.perf_counter()
        times = await asyncio.gather(*map(timed, islice(tasks, episodes)))
        seconds = time.perf_counter() - start
        opening, stepping, steps = (sum(column) for column in zip(*times, strict=True))
        rows.append(
            (parallel, f"{opening / episodes:.2f}", f"{stepping / steps:.2f}", f"{60 * episodes / seconds:.0f}")
        )
    await env.close()
    return rows


async def play(env: BrowserEnvironment, task: Task) -> tuple[float, float, int]:
    """Seconds to open an episode, seconds of its steps, and their number."""
    start = time.perf_counter()
    episode = env.open(task)
    await episode.start()
    opened = time.perf_counter()
    for kind, role, name, text in task.data["solution"]:
        answer = f"{kind} {episode.view.number(role, name)} {text}".strip()
        await episode.step({"role": "assistant", "content": answer})
    ended = time.perf_counter()
    if not (await episode.outcome()).solved:
        raise RuntimeError(f"the solution of {task.id} does not solve it")
    await episode.close()
    return opened - start, ended - opened, len(task.data["solution"])
