"""Two hundred episodes in a terminal, a part of them hostile. Run by `make test-environments`."""

import asyncio
import gc
import os
from itertools import cycle, islice
from pathlib import Path

import pytest

from openclaw_rl.envs.base import Task
from openclaw_rl.envs.registry import make_environment
from openclaw_rl.sandbox.kinds import problem_with
from support.process_stats import memory_mib, open_files, threads
from support.terminal_policies import attempt, destroys_everything, does_nothing, oracle

pytestmark = pytest.mark.skipif("OPENCLAW_RL_ENVIRONMENTS" not in os.environ, reason="make test-environments runs it")
EPISODES, ROUNDS, PARALLEL = 200, 5, 8
#: What may be added after the first round, by caches and by the allocator.
MAX_GROWTH_MIB, MAX_MORE_FILES, MAX_MORE_THREADS = 15, 2, 2

HOSTILE = {
    "hangs": "sleep 100",
    "floods": "yes",
    "leaves a daemon": "(setsid bash -c 'trap \"\" TERM HUP; while :; do sleep 1; done' &) > /dev/null 2>&1",
    "leaves a writer": "(while :; do echo x >> a; sleep 0.01; done) & disown",
    # With another user than root, and at most 64 processes: the test of the sandbox checks both first.
    "bombs": "[ $(id -u) != 0 ] && [ $(ulimit -Hu) = 64 ] && { bomb() { bomb | bomb & }; bomb; sleep 1; }",
    "fills": "for i in $(seq 6000); do echo > f$i; done",
    "nests": "d=$(printf 'x%.0s' {1..200}); for i in $(seq 30); do mkdir $d; cd $d; done",
    "locks": "chmod 0 . *",
    "exits": "exit 3",
    "escapes": "cat /etc/shadow; rm -rf /tmp/openclaw-* ~/..; echo > /dev/tcp/127.0.0.1/22",
}


def usage() -> tuple[float, int, int]:
    """Memory in MiB, open files and threads."""
    gc.collect()
    return memory_mib(os.getpid()), open_files(os.getpid()), threads(os.getpid())


def processes(folder: str) -> list[str]:
    """The processes on this machine that have something in a folder as their working folder or in their command."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            seen = [os.readlink(process / "cwd"), (process / "cmdline").read_bytes().decode(errors="replace")]
        except OSError:
            continue
        found += [f"{process.name} {seen[1]}"] if any(folder in text for text in seen) else []
    return found


@pytest.mark.parametrize("sandbox", ["fences", "bubblewrap"])
async def test_two_hundred_episodes_leave_nothing_behind(sandbox: str, folder: str) -> None:
    if problem := problem_with(sandbox):
        pytest.skip(problem)
    environment = make_environment("terminal", {"sandbox": sandbox, "levels": [1, 2, 3], "seconds": 1.5})
    tasks, slots = environment.tasks("train", 0), asyncio.Semaphore(PARALLEL)
    hostile = [(lambda _, command=command: [command]) for command in HOSTILE.values()]
    policies = cycle([oracle, *hostile, oracle, does_nothing, oracle, destroys_everything])
    solved = []

    async def play(task: Task, policy: object) -> None:
        async with slots:
            outcome = await attempt(environment, task, policy)  # type: ignore[arg-type]
        solved.append((policy is oracle, outcome.solved))

    rounds = []
    for _ in range(ROUNDS):
        await asyncio.gather(*map(play, islice(tasks, EPISODES // ROUNDS), policies))
        rounds.append(usage())
        print(" ".join(f"{value:.0f}" for value in rounds[-1]))  # noqa: T201 - numbers for the report
    assert len(solved) == EPISODES
    assert all(expected == is_solved for expected, is_solved in solved)
    first, last = rounds[0], rounds[-1]
    assert last[0] - first[0] < MAX_GROWTH_MIB, rounds
    assert last[1] - first[1] <= MAX_MORE_FILES, rounds
    assert last[2] - first[2] <= MAX_MORE_THREADS, rounds
    assert processes(folder) == []
    assert os.listdir(folder) == []
