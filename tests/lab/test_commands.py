"""Commands that work for minutes end when somebody presses Ctrl-C: real processes, real signals."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def started(program: str) -> Iterator[tuple[subprocess.Popen[str], Iterator[str]]]:
    """A process that runs a program, and the lines that it prints after the first, which says that it works."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        yield process, iter(process.stdout.readline, "")


SLOW_TO_STOP = """
import asyncio, sys
from rich.console import Console
from openclaw_rl.aio import start_process
from openclaw_rl.lab.commands import run_stoppable

async def work():
    process = await start_process(sys.executable, "-c", "import sys; sys.stdin.read()", stdin=asyncio.subprocess.PIPE)
    print("started", flush=True)
    try:
        await asyncio.sleep(3600)
    finally:
        await process.wait()

run_stoppable(work(), Console())
"""


SLOW_TO_END = """
import asyncio, threading, time
from rich.console import Console
from openclaw_rl.lab.commands import run_stoppable

async def work():
    print("started", flush=True)
    await asyncio.sleep(3600)

run_stoppable(work(), Console())
# The interpreter waits for it when it ends.
threading.Thread(target=time.sleep, args=(3600,)).start()
"""


SKIPPED = """
import asyncio
from rich.console import Console
from openclaw_rl.lab.commands import run_stoppable

async def work():
    print("started", flush=True)
    await asyncio.sleep(3600)

run_stoppable(work(), Console())
run_stoppable(work(), Console())
print("written", flush=True)
"""


def test_ctrl_c_after_the_work_has_stopped_ends_at_once_and_prints_no_traces() -> None:
    with started(SLOW_TO_END) as (process, lines):
        process.send_signal(signal.SIGINT)
        assert [next(lines), next(lines)][1] == "Stopped.\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300) == ("", "")
        assert process.returncode == 128 + signal.SIGINT


def test_ctrl_c_after_the_work_has_stopped_skips_what_comes_then() -> None:
    """As `demo` does, which then writes what was measured."""
    with started(SKIPPED) as (process, lines):
        process.send_signal(signal.SIGINT)
        assert [next(lines), next(lines), next(lines)][1:] == ["Stopped.\n", "started\n"]
        process.send_signal(signal.SIGINT)
        # What was read ahead with a line is not given by `communicate`.
        assert [next(lines), next(lines), next(lines)][1:] == ["Stopped.\n", "written\n"]
        assert process.communicate(timeout=300) == ("", "")
        assert process.returncode == 0


def test_ctrl_c_twice_ends_at_once_and_prints_no_traces() -> None:
    with started(SLOW_TO_STOP) as (process, lines):
        process.send_signal(signal.SIGINT)
        assert "Ctrl-C again" in next(lines)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=300) == ("", "")
        assert process.returncode == 128 + signal.SIGINT
