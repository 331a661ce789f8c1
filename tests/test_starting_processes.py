"""Processes whose start is cancelled."""

import asyncio
import contextlib
import subprocess
import sys
import threading
from uuid import uuid4

import pytest

from openclaw_rl.aio import start_process

#: Rounds of the loop before the start is cancelled: from before the fork to after the pipes are connected.
ROUNDS = range(7)
MANY = 4


def command(mark: str) -> list[str]:
    return [sys.executable, "-S", "-c", "import time; time.sleep(600)", mark]


def running(mark: str) -> bool:
    return mark in subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout


async def start(mark: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await start_process(*command(mark), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("rounds", ROUNDS)
async def test_a_cancelled_start_ends_and_leaves_no_process(rounds: int, times: int) -> None:
    """It may be cancelled twice, as by a time limit and then by the end of the program."""
    mark = uuid4().hex
    starting = asyncio.create_task(start(mark))
    for _ in range(rounds):
        await asyncio.sleep(0)
    for _ in range(times):
        starting.cancel()
        await asyncio.sleep(0)
    async with asyncio.timeout(20):
        with contextlib.suppress(asyncio.CancelledError):
            process = await starting
            process.kill()
            await process.wait()
    assert not running(mark)


def test_a_loop_ends_while_processes_start() -> None:
    """The end of a loop cancels all tasks, also those that were to be finished, and those that were cancelled."""
    mark = uuid4().hex

    async def main(rounds: int, cancelled: bool) -> None:
        tasks = [asyncio.create_task(start(mark)) for _ in range(MANY)]
        for _ in range(rounds):
            await asyncio.sleep(0)
        if cancelled:
            for task in tasks:
                task.cancel()
            await asyncio.sleep(0)

    # All at once, because a loop may wait a second for what it has killed.
    loops = [main(rounds, cancelled) for rounds in ROUNDS for cancelled in (False, True)]
    threads = [threading.Thread(target=asyncio.run, args=[loop], daemon=True) for loop in loops]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert not running(mark)
