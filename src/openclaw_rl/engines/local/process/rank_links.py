"""The ranks of a learner, seen from the server: several workers that behave as one."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from openclaw_rl.engines.local.process.launcher import WorkerLink
from openclaw_rl.engines.local.process.learner_messages import Broken, Meeting, Refused, Report, Started
from openclaw_rl.engines.local.process.link import EXIT_SECONDS


class RankLinks:
    """Implements `WorkerLink` with one link for each rank.

    - Every rank gets every command. There is one report for each, once all ranks have answered: a refusal if any
      rank refuses, otherwise the first rank's answer.
    - When one rank is gone, the reports end. Closing ends all ranks, also those that wait for the one that is gone.
    """

    def __init__(self, links: Sequence[WorkerLink]) -> None:
        self.links = links
        self._is_broken = False

    @property
    def pids(self) -> list[int]:
        return [pid for link in self.links for pid in link.pids]

    @property
    def nodes(self) -> list[str]:
        return [node for link in self.links for node in link.nodes]

    @property
    def end(self) -> str:
        ends = [f"Rank {number}: {link.end}" for number, link in enumerate(self.links) if link.end]
        # A rank that loses another one leaves too, with an exit code: what ended the other is the cause.
        return next((end for end in ends if "exit code" not in end), ends[0] if ends else "")

    def send(self, command: Any) -> None:
        for link in self.links:
            link.send(command)

    def interrupt(self) -> None:
        for link in self.links:
            link.interrupt()

    async def reports(self) -> AsyncIterator[Report]:
        arrived: asyncio.Queue[tuple[int, Report | None]] = asyncio.Queue()

        async def read(number: int, link: WorkerLink) -> None:
            async for report in link.reports():
                arrived.put_nowait((number, report))
            arrived.put_nowait((number, None))

        readers = [asyncio.create_task(read(number, link)) for number, link in enumerate(self.links)]
        waiting: list[deque[Report]] = [deque() for _ in self.links]
        try:
            while True:
                number, report = await arrived.get()
                if report is None:
                    self._is_broken = True
                    # Now, so that `end` knows how it ended before the others are killed.
                    await self.links[number].close()
                    return
                if isinstance(report, Broken):
                    yield report
                    return
                if isinstance(report, Meeting):
                    for link in self.links[1:]:
                        link.send(report)
                    continue
                waiting[number].append(report)
                if all(waiting):
                    yield as_one([queue.popleft() for queue in waiting])
        finally:
            for reader in readers:
                reader.cancel()

    async def close(self, patience: float = EXIT_SECONDS) -> None:
        # Ranks that wait for one that is gone do not notice that their pipes are closed.
        patience = 0.0 if self._is_broken else patience
        await asyncio.gather(*(link.close(patience) for link in self.links))


def as_one(answers: Sequence[Report]) -> Report:
    """The answer of all ranks to one command."""
    started = [answer for answer in answers if isinstance(answer, Started)]
    if started:
        return replace(started[0], devices=tuple(device for answer in started for device in answer.devices))
    return next((answer for answer in answers if isinstance(answer, Refused)), answers[0])
