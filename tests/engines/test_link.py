"""The pipe to a worker process, on the event loop that the server uses."""

import asyncio

import pytest

uvloop = pytest.importorskip("uvloop")

from openclaw_rl.engines.local.process.link import Link  # noqa: E402


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
