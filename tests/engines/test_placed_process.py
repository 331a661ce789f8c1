"""A server that runs inside a worker. The launcher is that of processes; a Ray cluster is in `make test-ray`."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from openclaw_rl.engines.local.process.launcher import ProcessLauncher
from openclaw_rl.engines.remote.process import PlacedServerProcess

#: It says its process id and then waits, unless it is told to fail.
PROGRAM = """
import os, sys, time
open(sys.argv[1], "w").write(str(os.getpid()))
print("it has begun", os.environ["GREETING"], flush=True)
os.path.exists(sys.argv[1] + ".fail") and sys.exit(3)
time.sleep(600)
"""


@pytest.fixture
def told(tmp_path: Path) -> Path:
    return tmp_path / "pid"


@pytest.fixture
async def server(told: Path) -> PlacedServerProcess:
    command = [sys.executable, "-c", PROGRAM, str(told)]
    return PlacedServerProcess("vllm", command, {"GREETING": "hello"}, ProcessLauncher(0))


async def begun(told: Path) -> int:
    async with asyncio.timeout(60):
        while not told.exists() or not told.read_text():
            await asyncio.sleep(0.05)
    return int(told.read_text())


async def gone(pid: int) -> None:
    async with asyncio.timeout(30):
        while Path(f"/proc/{pid}").exists():
            await asyncio.sleep(0.05)


async def test_it_runs_is_stopped_and_runs_again(server: PlacedServerProcess, told: Path) -> None:
    assert not server.running
    for _ in range(2):
        await server.start()
        pid = await begun(told)
        assert server.running
        await server.stop()
        assert not server.running
        await gone(pid)
        told.unlink()
    assert server.log.read_text().count("it has begun hello") == 2
    server.remove_log()


async def test_one_that_ends_by_itself_says_why(server: PlacedServerProcess, told: Path) -> None:
    told.with_suffix(".fail").touch()
    await server.start()
    async with asyncio.timeout(60):
        await server.wait()
    assert not server.running
    assert "it has begun hello" in server.why_it_ended()
    server.remove_log()


async def test_it_ends_with_a_worker_that_is_killed(server: PlacedServerProcess, told: Path) -> None:
    await server.start()
    pid = await begun(told)
    assert server._link is not None
    os.kill(server._link.pids[0], signal.SIGKILL)
    async with asyncio.timeout(60):
        await server.wait()
    assert not server.running
    await gone(pid)
    server.remove_log()


async def test_it_ends_with_a_guard_that_is_killed(server: PlacedServerProcess, told: Path) -> None:
    await server.start()
    pid = await begun(told)
    guard = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(guard, signal.SIGKILL)
    async with asyncio.timeout(60):
        await server.wait()
    await gone(pid)
    server.remove_log()
