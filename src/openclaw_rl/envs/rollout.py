"""`openclaw-rl rollout`: episodes of an environment against a running server, or against one that is started for it.

With --measure it is a study: the held-out share before, training, the held-out share after.
"""

import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openclaw_rl import terminal
from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.connection import PolicyServer, QueueState, Sampling
from openclaw_rl.envs.driver import EpisodeLimits, MakeDriver, RolloutPlan, RolloutWatcher
from openclaw_rl.envs.options import DriverOptions
from openclaw_rl.envs.registry import EpisodeSource
from openclaw_rl.envs.tally import Tally, mean_reward, progress_line, share_solved, summary, troubles
from openclaw_rl.errors import UserError
from openclaw_rl.lab.charts import Chart, Series, chart_file, line_chart
from openclaw_rl.lab.charts import share as percent
from openclaw_rl.lab.commands import RunProgress, check_writable, run_stoppable, waiting_turns, write_text
from openclaw_rl.lab.server import run_server, started_with, wait_while
from openclaw_rl.lab.statistics import Difference, Interval, compare_passes, proportion
from openclaw_rl.lab.tasks import HELD_OUT

#: Options of a server that is started for a rollout: it learns from rewards alone, in steps of whole groups, and fast
#: enough for a small model. Options after `--` come later and override these.
SERVER_FLAGS = (
    *("--judge", "feedback", "--baseline", "group", "--batch-size", "32", "--learning-rate", "3e-4"),
    *("--lora-rank", "16", "--kv-cache-gib", "1"),
)
#: Where a server that is started for a rollout runs, unless --run-dir says so.
DEFAULT_RUN_DIR = Path("runs/rollout")
#: Seconds between two lines where there is no terminal.
LINE_SECONDS = 10.0
#: The picture of a study, in its run directory.
PICTURE = "curve.svg"
#: How long to wait for the last training steps.
MAX_SETTLE_SECONDS = 180.0
POLL_SECONDS = 0.5
#: Attempts in one point of the learning curve.
CURVE_POINT = 64

#: Shows one part of the study: its name, and the number of episodes.
Show = Callable[[str, int], AbstractContextManager[RolloutWatcher]]


@dataclass(frozen=True, slots=True)
class Target:
    """The server that answers: a running one, or one to start."""

    url: str = ""
    """The address of a running server; empty to start one."""
    key: str = ""
    run_dir: Path = DEFAULT_RUN_DIR
    flags: tuple[str, ...] = ()
    """Options of the server to start."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the results say about the server: its method, its model."""

    @property
    def arguments(self) -> list[str]:
        """The arguments of `serve`, if the server is to be started."""
        return started_with(self.run_dir, self.flags)

    @contextlib.asynccontextmanager
    async def connect(self, console: Console) -> AsyncIterator[PolicyServer]:
        """The server, ready. A server that was started is stopped at the end. Raises UserError."""
        if self.url:
            async with PolicyServer(self.url, self.key) as server:
                yield server
            return
        console.print(f"Starting a server in {self.run_dir} …", soft_wrap=True)
        async with run_server(self.run_dir, *self.flags) as started, PolicyServer(started.url) as server:
            yield server
        console.print(f"Its run: openclaw-rl report --run-dir {self.run_dir}", soft_wrap=True)


def rollout(
    source: EpisodeSource, options: DriverOptions, target: Target, seed: int, cases: int, out: Path | None
) -> int:
    """Run the episodes, and with `cases` measure that many held-out tasks before and after. Exit status."""
    plan = make_plan(options, seed)
    if cases and plan.limits.evaluates:
        raise ConfigError("--measure and --eval exclude each other: --eval already trains on nothing.")
    if out:
        check_writable(out)
    work = RolloutRun(source, plan, target, cases, terminal.console())
    try:
        run_stoppable(work.run(), work.console)
    finally:
        # Also after an error or Ctrl-C: what was done is worth showing.
        work.show()
        if out:
            work.write(out)
    return 0 if work.recorded else 1


class RolloutScreen(RunProgress):
    """Shows the progress of one rollout: a bar in a terminal, lines elsewhere."""

    def __init__(self, console: Console, what: str, total: int) -> None:
        super().__init__(console, what, total)
        self._next_line = time.monotonic() + LINE_SECONDS

    def ended(self, tally: Tally) -> None:
        self.advance()
        self._show(tally, "")

    def waiting(self, tally: Tally) -> None:
        self._show(tally, f"waiting for the learner, {tally.batches_ahead:.1f} steps behind")

    def _show(self, tally: Tally, note: str) -> None:
        numbers = progress_line(tally) + (f" · {note}" if note else "")
        self.note(numbers)
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LINE_SECONDS
            self.log(f"{self.what}: {len(tally.results)} of {self.total} episodes · {numbers}")


class RolloutRun:
    """A rollout, and what is known of it when it ends, however it ends."""

    def __init__(self, source: EpisodeSource, plan: RolloutPlan, target: Target, cases: int, console: Console) -> None:
        self.source, self.plan, self.target, self.cases, self.console = source, plan, target, cases, console
        self.study = Study()

    async def run(self) -> None:
        """Raises UserError, or a group of them."""
        if self.source.about:
            self.console.print(Text(f"{self.plan.name}: {self.source.about}"), soft_wrap=True)
        try:
            async with self.target.connect(self.console) as server:
                if self.cases:
                    await self.study.run(self.source.driver, server, self.plan, self.cases, self._screen)
                else:
                    # A server of others goes on by itself.
                    own = not self.target.url
                    await self.study.train(self.source.driver, server, self.plan, self._screen, settles=own)
        finally:
            await self.source.close()

    def _screen(self, what: str, total: int) -> RolloutScreen:
        return RolloutScreen(self.console, f"{self.plan.name} {what}", total)

    @property
    def recorded(self) -> bool:
        """Whether the server has recorded anything."""
        return any(not result.unrecorded for result in self.study.training.rewarded) if self.study.training else False

    def show(self) -> None:
        if self.study.training:
            self.console.print(summary(self.study.training, f"Episodes of {self.plan.name}, split {self.plan.split}"))
        if not self.target.url and (left := self._left()):
            self.console.print(Text(left), soft_wrap=True)
        if self.study.before:
            self.console.print(results_table(self.study))
        if self.study.after and not self.target.url:
            self._save_picture(self.target.run_dir / PICTURE)
        for part, tally in (("before", self.study.before), ("after", self.study.after)):
            for what, reason in troubles(tally) if tally else ():
                self.console.print(Text(f"{part}: {what} {reason}", style="yellow"), soft_wrap=True)

    def _left(self) -> str:
        """What the server that stops has not trained on, and how to do it; empty if there is nothing."""
        left = self.study.left
        if left is None or not (waiting := waiting_turns(left.waiting, left.needed)):
            return ""
        again = f"The same command with --run-dir {self.target.run_dir} goes on with them"
        return f"{waiting}. {again}; -- --batch-size {left.waiting} makes a step of them alone."

    def _save_picture(self, path: Path) -> None:
        try:
            write_text(
                path, chart_file("Tasks solved", [chart(self.study, f"{self.plan.name}, seed {self.plan.seed}")])
            )
            self.console.print(f"Picture: {path}", soft_wrap=True)
        except UserError as error:
            self.console.print(str(error), markup=False, soft_wrap=True)

    def write(self, path: Path) -> None:
        """Append one line of JSON with everything that was measured."""
        head = {"env": self.plan.name, "seed": self.plan.seed, "group": self.plan.group, **self.target.facts}
        with path.open("a") as file:
            file.write(json.dumps({**head, **study_data(self.study)}) + "\n")


def make_plan(options: DriverOptions, seed: int) -> RolloutPlan:
    sampling = Sampling(options.max_tokens, options.temperature)
    limits = EpisodeLimits(
        options.max_turns, options.turn_timeout, options.episode_timeout, sampling, evaluates=options.eval
    )
    return RolloutPlan(
        short_name(options.env),
        options.split,
        seed,
        options.tasks,
        options.group,
        options.parallel,
        limits,
        options.minutes,
    )


def short_name(env: str) -> str:
    """What rewards and pages call an environment: its name, or the name in an own file."""
    place, _, name = env.partition(":")
    return name or Path(place).stem


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

    def show(state: QueueState | None) -> None:
        tally.batches_ahead = state.batches if state else 0.0
        watch.waiting(tally)

    return await wait_while(
        lambda state: state is None or state.training or state.batches >= 1,
        server.queue,
        MAX_SETTLE_SECONDS,
        show,
        POLL_SECONDS,
    )


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
            shown = f"{100 * share.mean:.1f} ({100 * share.low:.1f}–{100 * share.high:.1f})"
            table.add_row(name, shown, str(share.n), f"{mean_reward(tally.rewarded):.3f}", str(tally.version))
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
        share = solved_share(tally)
        data[name] = {
            "solved": asdict(share) if share else None,
            "tasks": tally.groups,
            "reward": round(mean_reward(tally.rewarded), 4),
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
        reward, solved = round(mean_reward(part), 4), round(share_solved(part), 4)
        points.append({"episodes": start + len(part), "reward": reward, "solved": solved})
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
