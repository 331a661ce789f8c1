"""The pipe to a worker process, on the event loop that the server uses."""

import asyncio
import os
import signal
import threading

import pytest

uvloop = pytest.importorskip("uvloop")

from openclaw_rl.engines.local.process.launcher import Link  # noqa: E402


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


def _sends(link: Link[bytes, bytes]) -> bool:
    """Whether the thread that sends commands has taken one and is not done with it."""
    return link._sender.is_alive() and link._outbox.empty()
