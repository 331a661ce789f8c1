"""Two hundred episodes in one browser, and every page of MiniWoB++. Run by `make test-browser`."""

import asyncio
import gc
import importlib.util
import os
from itertools import islice

import pytest

from openclaw_rl.envs.base import EnvFailed, Task
from openclaw_rl.envs.browser.environment import make_browser
from openclaw_rl.envs.browser.miniwob import html_folder
from openclaw_rl.envs.browser.site_tasks import LEVELS
from support.browsing import browsers, memory_mib, needs_browser, processes
from support.policies import attempt, says
from support.process_stats import open_files, threads
from support.web_pages import oracle

pytestmark = needs_browser
EPISODES, ROUNDS, PARALLEL = 200, 5, 4
#: What may be added after the first round, by caches and by the allocator.
MAX_GROWTH_MIB, MAX_MORE_PROCESSES, MAX_MORE_FILES = 120, 2, 4


def usage() -> tuple[float, int, int, int]:
    """Memory in MiB, processes, open files and threads."""
    gc.collect()
    return memory_mib(), len(list(processes())), open_files(os.getpid()), threads(os.getpid())


async def test_two_hundred_episodes_leave_nothing_behind() -> None:
    env = make_browser(levels=list(LEVELS))
    tasks = env.tasks("train", 0)
    slots = asyncio.Semaphore(PARALLEL)

    async def play(task: Task) -> None:
        async with slots:
            episode = env.open(task)
            _, outcome = await attempt(episode, oracle(task, episode))
        assert outcome.solved, task

    rounds = []
    for _ in range(ROUNDS):
        await asyncio.gather(*map(play, islice(tasks, EPISODES // ROUNDS)))
        await asyncio.sleep(1)  # processes of closed tabs end a moment later
        rounds.append(usage())
        print(" ".join(f"{value:.0f}" for value in rounds[-1]))  # noqa: T201 - numbers for the report
    first, last = rounds[0], rounds[-1]
    assert last[0] - first[0] < MAX_GROWTH_MIB, rounds
    assert last[1] - first[1] <= MAX_MORE_PROCESSES, rounds
    assert last[2] - first[2] <= MAX_MORE_FILES, rounds
    assert last[3] - first[3] <= MAX_MORE_PROCESSES, rounds
    await env.close()
    assert not browsers()


@pytest.mark.skipif(importlib.util.find_spec("miniwob") is None, reason="there is no miniwob")
async def test_every_page_of_miniwob_starts_and_ends() -> None:
    pages = sorted(path.stem for path in (html_folder() / "miniwob").glob("*.html"))
    assert len(pages) == 130
    env = make_browser(miniwob="all")
    slots = asyncio.Semaphore(PARALLEL)
    failed: list[str] = []

    async def play(page: str) -> None:
        async with slots:
            episode = env.open(Task(page, {"page": page, "seed": 7}))
            try:
                goal = (await episode.start())[-1]["content"].split("\n")[0]
                assert goal.strip(), page
                assert (await episode.step(says("click 1"))) is not None
                assert -1 <= (await episode.outcome()).reward <= 1
            except EnvFailed as error:
                failed.append(f"{page}: {error}")
            finally:
                await episode.close()

    await asyncio.gather(*map(play, pages))
    assert not failed
    await env.close()
