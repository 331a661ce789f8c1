"""What the benchmark asks a system, and the line of JSON of each item. The same seed asks the same."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from openclaw_rl import __version__
from openclaw_rl.client import ServerError
from openclaw_rl.evals.benchmark.person import OrdinaryChat
from openclaw_rl.evals.benchmark.systems import NotOffered, System
from openclaw_rl.evals.benchmark.tracks import FULL, QUICK, TRACKS, Scored, Size, TrackItem
from openclaw_rl.evals.demo import commit
from openclaw_rl.evals.items import ItemGroup, RunItem
from openclaw_rl.evals.result_log import ResultLog
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


def items_of(system: System, plan: BenchmarkPlan, log: ResultLog) -> ItemGroup[None]:
    """What is asked of a system with a seed. An item raises ServerError, ServerFailed, or a group of them."""

    async def measure(first: int, item: TrackItem, _: None) -> tuple[Mapping[str, Any], str]:
        times = log.begin([*item.key])
        line = await measured(system, first, item, plan.size.longest)
        words = f"{system.name}, seed {plan.seed}: {item.track}, {item.name}: {in_words(line)}"
        return {"track": item.track, "item": item.name, **line, "begun_times": times}, words

    numbered = plan.items()
    people = max(first + item.people for first, item in numbered)
    items = [RunItem(item.key, partial(measure, first, item)) for first, item in numbered]
    return ItemGroup(items, partial(system.started, people), log, one_per_server=system.one_per_server)


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
    one = scored or Scored([])
    parts = {name: share(marks) for name, marks in one.parts.items()}
    held = asdict(one.held) if one.held else None
    return {"score": share(one.marks), "marks": one.marks, "parts": parts, "held": held, "facts": one.facts}


def share(marks: Marks) -> dict[str, Any] | None:
    return asdict(proportion_of_trials([marks])) if marks else None
