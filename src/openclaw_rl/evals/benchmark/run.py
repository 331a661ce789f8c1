"""Runs the benchmark: items one after another or at once, and a line of JSON for each as soon as it is done.

A run that was stopped goes on where it stopped. The same seed asks the same.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any

from openclaw_rl import __version__
from openclaw_rl.aio import run_concurrently
from openclaw_rl.client import ServerError
from openclaw_rl.evals.benchmark.person import OrdinaryChat
from openclaw_rl.evals.benchmark.systems import NotOffered, System
from openclaw_rl.evals.benchmark.tracks import FULL, QUICK, TRACKS, Scored, Size, TrackItem
from openclaw_rl.evals.demo import commit
from openclaw_rl.evals.result_log import ResultLog
from openclaw_rl.evals.screen import TimeLeft
from openclaw_rl.lab.statistics import Interval, Marks, proportion_of_trials

#: The version of the results. Lines of another one are not compared.
FORMAT = 1
#: What must be equal for a run to go on.
FIXED = ("benchmark", "system", "seed", "quick", "version", "model", "wire", "quiet")


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """What is asked of a system."""

    tracks: Sequence[str]
    seed: int
    quick: bool
    quiet: float | None = None
    """How long nobody talks to an endpoint before it is examined; None: as long as its size says."""

    @property
    def size(self) -> Size:
        size = QUICK if self.quick else FULL
        return size if self.quiet is None else replace(size, quiet_seconds=self.quiet)

    def items(self) -> list[tuple[int, TrackItem]]:
        """The items of the chosen tracks, each with the number of its first person among those of all tracks."""
        first, chosen = 0, []
        for track, make in TRACKS.items():
            for item in make(self.size, self.seed):
                if track in self.tracks:
                    chosen.append((first, item))
                first += item.people
        return chosen


def head_of(system: System, plan: BenchmarkPlan) -> dict[str, Any]:
    return {
        "benchmark": FORMAT,
        "system": system.name,
        "seed": plan.seed,
        "quick": plan.quick,
        "quiet": plan.size.quiet_seconds,
        "version": __version__,
        "commit": commit(),
        "began": round(time.time()),
        **system.facts,
    }


class BenchmarkPart:
    """A system that is asked with a seed, and the file of its results."""

    def __init__(self, system: System, plan: BenchmarkPlan, log: ResultLog) -> None:
        self.system, self.plan, self.log = system, plan, log
        done = {(line["track"], line["item"]) for line in log.lines}
        self.left = [(first, item) for first, item in plan.items() if item.key not in done]
        self._people = max((first + item.people for first, item in self.left), default=0)
        self._unfinished = len(self.left)
        self.under_way = 0
        """Items that need a server each now."""
        self._started = contextlib.AsyncExitStack()
        self._starting: asyncio.Task[None] | None = None

    async def measure(self, first: int, item: TrackItem) -> str:
        """Measure an item; what it has shown, in words. Raises ServerError, ServerFailed, or a group of them."""
        self.under_way += self.system.one_per_server
        if self._starting is None:
            started = self.system.started(self._people)
            self._starting = asyncio.create_task(self._started.enter_async_context(started))
        await asyncio.shield(self._starting)
        times = self.log.begin([*item.key])
        line = await measured(self.system, first, item, self.plan.size.longest)
        self.log.add({"track": item.track, "item": item.name, **line, "begun_times": times})
        self._unfinished -= 1
        self.under_way -= self.system.one_per_server
        if not self._unfinished:
            await self.close()
        return f"{self.system.name}, seed {self.plan.seed}: {item.track}, {item.name}: {in_words(line)}"

    async def close(self) -> None:
        """Stop what was started."""
        if self._starting and not self._starting.done():
            self._starting.cancel()
            await asyncio.gather(self._starting, return_exceptions=True)
        await self._started.aclose()


async def measure_all(parts: Sequence[BenchmarkPart], at_once: int, say: Callable[[str], None]) -> None:
    """Measure what is not done yet, `at_once` items at a time. Raises ServerError, ServerFailed, or a group of them."""
    total = sum(len(part.left) for part in parts)
    time_left, done = TimeLeft(total), count(1)
    workers = 1 if any(part.system.one_at_a_time for part in parts) else at_once

    async def work(_: int) -> None:
        # Taken from what is left, so that no item begins after another has failed.
        while left := [part for part in parts if part.left]:
            part = min(left, key=lambda one: one.under_way)
            said = await part.measure(*part.left.pop(0))
            time_left.advance(1)
            say(f"{said} ({', '.join(filter(None, (f'{next(done)} of {total} items', str(time_left))))})")

    async with contextlib.AsyncExitStack() as stack:
        for part in parts:
            stack.push_async_callback(part.close)
        await run_concurrently(range(workers), work, workers)


async def measured(system: System, first: int, item: TrackItem, longest: int) -> dict[str, Any]:
    """What an item has shown, or why it cannot be scored. Raises ServerError if the endpoint is gone."""
    began = time.monotonic()
    people: Sequence[OrdinaryChat] = ()
    scored, steps, reason = None, None, ""
    try:
        async with system.venue(f"{item.track}-{item.name}".replace(" ", "-"), first, item.people) as venue:
            people = venue.people
            for chat in people:
                chat.longest = longest
            scored = await item.run(venue)
            steps = await venue.steps()
    except NotOffered as error:
        reason = str(error)
    except ServerError as error:
        if not error.is_refusal:
            raise
        reason = f"The endpoint refuses what is asked: {error}"
    costs = [asdict(chat.cost) for chat in people]
    cost = {name: sum(one[name] for one in costs) for name in ("requests", "prompt_tokens", "answer_tokens")}
    return {
        **shown(scored),
        "reason": reason,
        "steps": steps,
        "seconds": round(time.monotonic() - began, 1),
        "cost": {**cost, "estimated": any(one["estimated"] for one in costs)},
        "log": [chat.log for chat in people],
    }


def in_words(line: Mapping[str, Any]) -> str:
    score, steps = line["score"], line["steps"]
    if not score:
        return str(line["reason"]).rstrip(".")
    trained = f", {steps} training step{'' if steps == 1 else 's'}" if steps is not None else ""
    return f"{Interval(**score)} in {line['seconds']:.0f} s{trained}"


def shown(scored: Scored | None) -> dict[str, Any]:
    """A score as data for JSON."""
    if scored is None:
        return {"score": None, "marks": [], "parts": {}, "held": None, "facts": {}}
    return {
        "score": share(scored.marks),
        "marks": scored.marks,
        "parts": {name: share(marks) for name, marks in scored.parts.items()},
        "held": asdict(scored.held) if scored.held else None,
        "facts": scored.facts,
    }


def share(marks: Marks) -> dict[str, Any] | None:
    return asdict(proportion_of_trials([marks])) if marks else None
