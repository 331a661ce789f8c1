"""Two hundred episodes in repositories, some of them hostile, leave nothing behind. Run by `make test-environments`."""

import asyncio
import gc
import os
import tempfile
from itertools import cycle, islice
from pathlib import Path

import pytest

from openclaw_rl.envs.base import Task
from openclaw_rl.envs.swe.environment import LEVELS, PlantedBugs, make_swe
from support.process_stats import memory_mib, open_files, threads
from support.swe_policies import Policy, call, destroys_everything, does_nothing, oracle, play

pytestmark = pytest.mark.skipif("OPENCLAW_RL_ENVIRONMENTS" not in os.environ, reason="make test-environments runs it")
EPISODES, ROUNDS, PARALLEL = 200, 5, 4
MAX_GROWTH_MIB = 20
DAEMON = """
import os
if os.fork() == 0:
    os.setsid()
open("large", "w").write("x" * 1000000)
while True:
    pass
"""


def leaves_a_daemon(task: Task) -> list[object]:
    """Code that starts a process of its own, writes a large file, and never ends."""
    path = task.data["solution"][0]["path"]
    return [call("edit", path=path, old=task.data["files"][path], new=DAEMON), call("run_tests")]


def usage() -> tuple[float, int, int, int, int]:
    """Memory in MiB, processes of the machine's nobody, open files, threads, and folders of ours."""
    gc.collect()
    nobody = sum(Path(f"/proc/{pid}").stat().st_uid == 65534 for pid in os.listdir("/proc") if pid.isdecimal())
    folders = len(list(Path(tempfile.gettempdir()).glob("openclaw-s*")))
    return memory_mib(os.getpid()), nobody, open_files(os.getpid()), threads(os.getpid()), folders


@pytest.mark.usefixtures("folder")
async def test_two_hundred_episodes_leave_nothing_behind() -> None:
    environment = make_swe(levels=list(LEVELS))
    assert isinstance(environment, PlantedBugs)
    policies: list[Policy] = [*[oracle] * 16, does_nothing, destroys_everything, oracle, leaves_a_daemon]  # type: ignore[list-item]
    tasks = zip(environment.tasks("train", 0), cycle(policies), strict=False)
    slots = asyncio.Semaphore(PARALLEL)

    async def one(task: Task, policy: Policy) -> None:
        async with slots:
            outcome = await play(environment, task, policy)
        assert outcome.solved == (policy is oracle), task

    rounds = []
    for _ in range(ROUNDS):
        await asyncio.gather(*(one(*pair) for pair in islice(tasks, EPISODES // ROUNDS)))
        rounds.append(usage())
        print(" ".join(f"{value:.0f}" for value in rounds[-1]))  # noqa: T201 - numbers for the report
    first, last = rounds[0], rounds[-1]
    assert last[0] - first[0] < MAX_GROWTH_MIB, rounds
    assert last[2:] == first[2:], rounds
    assert last[4] == 0, rounds
