"""Measures what training in an environment changes: the held-out share before, training, the held-out share after."""

import asyncio
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.table import Table

from openclaw_rl.envs.connection import PolicyServer, QueueState
from openclaw_rl.envs.driver import MakeDriver, RolloutPlan, RolloutWatcher
from openclaw_rl.envs.tally import Tally, mean
from openclaw_rl.lab.charts import Chart, Series, line_chart
from openclaw_rl.lab.charts import share as percent
from openclaw_rl.lab.statistics import Difference, Interval, compare_passes, proportion
from openclaw_rl.lab.tasks import HELD_OUT

#: How long to wait for the last training steps.
MAX_SETTLE_SECONDS = 180.0
POLL_SECONDS = 0.5
#: Attempts in one point of the learning curve.
CURVE_POINT = 64

#: Shows one part of the study: its name, and the number of episodes.
Show = Callable[[str, int], AbstractContextManager[RolloutWatcher]]


@dataclass(slots=True)
class Study:
    """The parts of a study that are done."""

    before: Tally | None = None
    training: Tally | None = None
    after: Tally | None = None
    left: QueueState | None = None
    """What the server had not trained on when training was over."""

    async def run(self, make: MakeDriver, server: PolicyServer, plan: RolloutPlan, cases: int, show: Show) -> None:
        """Measure, train, measure. The measured tasks and the seeds of their answers are the same both times.

        No task is measured twice: an environment that repeats its tasks is measured on those that it has.
        """
        exam = replace(
            plan,
            split=HELD_OUT,
            tasks=cases,
            group=1,
            limits=replace(plan.limits, evaluates=True),
            minutes=None,
            distinct=True,
        )
        with show("before", cases) as watch:
            driver = make(server, exam, watch)
            self.before = driver.tally
            await driver.run()
        await self.train(make, server, plan, show, settles=True)
        with show("after", cases) as watch:
            driver = make(server, exam, watch)
            self.after = driver.tally
            await driver.run()

    async def train(
        self, make: MakeDriver, server: PolicyServer, plan: RolloutPlan, show: Show, *, settles: bool
    ) -> None:
        """Run the plan alone; with `settles`, wait until the server has trained on what it can train on."""
        with show("evaluating" if plan.limits.evaluates else "training", plan.tasks * plan.group) as watch:
            driver = make(server, plan, watch)
            # Kept from the start: a part that is stopped still has results.
            self.training = driver.tally
            await driver.run()
            if settles and not plan.limits.evaluates:
                self.left = await settle(server, driver.tally, watch)


async def settle(server: PolicyServer, tally: Tally, watch: RolloutWatcher) -> QueueState | None:
    """Wait for the server's last training steps; what is left then. None if it does not say."""
    end = time.monotonic() + MAX_SETTLE_SECONDS
    while True:
        state = await server.queue()
        settled = state is not None and not state.training and state.batches < 1
        if settled or time.monotonic() > end:
            return state
        tally.batches_ahead = state.batches if state is not None else 0.0
        watch.waiting(tally)
        await asyncio.sleep(POLL_SECONDS)


def solved_share(tally: Tally) -> Interval | None:
    """The share of solved tasks; failed attempts do not count."""
    passes = [result.solved for result in tally.rewarded]
    return proportion(passes) if passes else None


def change(before: Tally, after: Tally) -> Difference | None:
    """What training changed, on the tasks that were attempted without failure both times."""
    old = {(result.index, result.task): result.solved for result in before.rewarded}
    new = {(result.index, result.task): result.solved for result in after.rewarded}
    both = sorted(old.keys() & new.keys())
    return compare_passes([old[task] for task in both], [new[task] for task in both]) if both else None


def results_table(study: Study) -> Table:
    """Held-out shares before and after, and their difference."""
    table = Table(title="Held-out tasks solved, in % (95 % interval)", title_justify="left")
    for heading in ("", "solved", "episodes", "reward", "policy"):
        table.add_column(heading)
    for name, tally in (("before", study.before), ("after", study.after)):
        if tally is not None and (share := solved_share(tally)):
            reward = mean([result.reward for result in tally.rewarded if result.reward is not None])
            shown = f"{100 * share.mean:.1f} ({100 * share.low:.1f}–{100 * share.high:.1f})"
            table.add_row(name, shown, str(share.n), f"{reward:.3f}", str(tally.version))
    if study.before and study.after and (difference := change(study.before, study.after)):
        low, high = 100 * difference.low, 100 * difference.high
        table.add_row("change", f"{100 * difference.mean:+.1f} ({low:+.1f} – {high:+.1f}), p = {difference.p:.2g}")
    return table


def study_data(study: Study) -> dict[str, Any]:
    """A study as data for JSON."""
    data: dict[str, Any] = {}
    for name, tally in (("before", study.before), ("training", study.training), ("after", study.after)):
        if tally is None:
            continue
        rewards = [result.reward for result in tally.rewarded if result.reward is not None]
        share = solved_share(tally)
        data[name] = {
            "solved": asdict(share) if share else None,
            "tasks": tally.groups,
            "reward": round(mean(rewards), 4),
            "policy_version": tally.version,
            "failures": dict(tally.failures),
            "retries": tally.retries,
            "unrecorded": dict(tally.unrecorded),
            "seconds": round(tally.seconds, 1),
        }
    if study.training:
        data["curve"] = curve(study.training)
    if study.before and study.after and (difference := change(study.before, study.after)):
        data["change"] = asdict(difference)
    return data


def curve(tally: Tally) -> list[dict[str, float]]:
    """Reward and solved share of the attempts in the order of their ends."""
    points = []
    for start in range(0, len(tally.rewarded), CURVE_POINT):
        part = tally.rewarded[start : start + CURVE_POINT]
        rewards = [result.reward for result in part if result.reward is not None]
        solved = [float(result.solved) for result in part]
        points.append(
            {"episodes": start + len(part), "reward": round(mean(rewards), 4), "solved": round(mean(solved), 4)}
        )
    return points


def chart(study: Study, title: str) -> Chart:
    """The share of tasks solved while training, and of held-out tasks before and after with their intervals."""
    points = [(point["episodes"], point["solved"]) for point in curve(study.training)] if study.training else []
    ends = ((study.before, 0.0), (study.after, points[-1][0] if points else 1.0))
    held_out = [(place, share) for tally, place in ends if tally and (share := solved_share(tally))]
    series = [
        Series("training tasks", points, "s0"),
        Series(
            "held-out tasks, 95 % interval",
            [(place, share.mean) for place, share in held_out],
            "s1",
            [(place, share.low, share.high) for place, share in held_out],
            "points",
        ),
    ]
    return line_chart(title, series, unit="episode", axis="training episodes", lowest=0, highest=1, form=percent)
