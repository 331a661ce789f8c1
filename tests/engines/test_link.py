"""The pipe to a worker process, on the event loop that the server uses."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

uvloop = pytest.importorskip("uvloop")

from openclaw_rl.engines.local.process.launcher import Link  # noqa: E402

#: Starts a worker, lets it rest, and says which process it is.
SERVER = """
import asyncio
from openclaw_rl.engines.local.process.launcher import Link

async def main():
    link = Link("support.obedient_worker", b"ready", 1000)
    await anext(aiter(link.reports()))
    link.pause(paused=True)
    print(link.pids[0], flush=True)
    await asyncio.sleep(60)

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_messages_that_do_not_fit_into_the_pipe_arrive_whole(new_loop: object) -> None:
    """A long prompt, or the handles of all weights on a GPU, are sent in several pieces."""
    large = bytes(range(256)) * 16384

    async def talk() -> list[object]:
        link: Link[bytes, bytes] = Link("support.slow_worker", None, 1000)
        answers: list[object] = []
        try:
            link.send(large)
            link.send(b"and one more")
            async with asyncio.timeout(30):
                async for report in link.reports():
                    answers.append(report)
                    if len(answers) == 2:
                        break
        finally:
            await link.close()
        return answers

    with asyncio.Runner(loop_factory=new_loop) as runner:  # type: ignore[arg-type]
        assert runner.run(talk()) == [large, b"and one more"]


async def test_the_pipe_is_not_closed_under_the_thread_that_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[object] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    link: Link[bytes, bytes] = Link("support.obedient_worker", b"ready", 1000)
    async with asyncio.timeout(60):
        assert await anext(aiter(link.reports())) == b"ready"
        os.kill(link.pids[0], signal.SIGSTOP)
        link.send(bytes(1 << 24))
        while not _sends(link):
            await asyncio.sleep(0.01)
        # It reads on once the pipe is closed on this side.
        asyncio.get_running_loop().call_later(0.1, os.kill, link.pids[0], signal.SIGCONT)
        await link.close()
    assert not raised
    assert link.connection.closed
    assert not _sends(link)


async def test_a_worker_rests_where_it_is_and_goes_on() -> None:
    link: Link[bytes, bytes] = Link("support.obedient_worker", b"ready", 1000)
    try:
        async with asyncio.timeout(60):
            reports = aiter(link.reports())
            assert await anext(reports) == b"ready"
            link.pause(paused=True)
            link.send(b"work")
            answer = asyncio.ensure_future(anext(reports))
            await asyncio.sleep(0.3)
            assert not answer.done()
            link.pause(paused=False)
            # It may have been told to rest and to go on before it looked.
            for _ in range(20):
                link.pause(paused=True)
                link.pause(paused=False)
            assert await answer == b"work"
    finally:
        await link.close()


def test_a_worker_that_rests_ends_with_the_server() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True, env=environment)
    assert server.stdout is not None
    worker = int(server.stdout.readline())
    server.kill()
    server.wait()
    for _ in range(600):
        if not Path(f"/proc/{worker}").exists() or "Z" in Path(f"/proc/{worker}/stat").read_text().split(")")[1]:
            return
        time.sleep(0.05)
    os.kill(worker, signal.SIGKILL)
    pytest.fail("it rests for ever")


def _sends(link: Link[bytes, bytes]) -> bool:
    """Whether the thread that sends commands has taken one and is not done with it."""
    return link._sender.is_alive() and link._outbox.empty()
