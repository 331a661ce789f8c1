"""Reports each step: in the log, in `metrics.jsonl`, to Prometheus and optionally to other services.

With `--record`, also what each sample taught: the hints with the overlap of teacher and policy under each, the hint
that taught each token, and the tokens it was taught about, with their gaps and weights.
"""

import importlib
import json
import logging
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import StepResult
from openclaw_rl.errors import UserError
from openclaw_rl.http_client import text_without_accounts
from openclaw_rl.methods.base import Method
from openclaw_rl.types import SampleKind, Source, StoredTurn

log = logging.getLogger(__name__)

#: The difference between the log-probs of sampler and learner for the same tokens of the same policy.
GAP_NAMES = MEAN_GAP, P99_GAP = "logprob_gap", "logprob_gap_p99"
#: A larger mean difference is worth a warning. Two correct engines in bfloat16 differ by about a fifth of it.
MAX_MEAN_GAP = 0.1
EPISODE_METRICS = ("episodes", "episode_reward", "solved", "groups", "constant_groups")
#: In the run directory: one line for each sample.
RECORDS_FILE = "records.jsonl"
#: In the folder of a line: one line for each step.
METRICS_FILE = "metrics.jsonl"
#: Lines that have a number of their own in Prometheus. The others are counted together.
MAX_LINES_SHOWN = 50
OTHER_LINES = "other"


@dataclass(frozen=True, slots=True)
class StepReport:
    """The metrics of one step."""

    step: int
    version: int
    samples: int
    opd_rl: int
    opd: int
    rl: int
    reward: float | None
    """Mean score of the samples that have one; None if none has."""
    loss: float
    kl_old: float
    kl_base: float
    clip_fraction: float
    grad_norm: float
    staleness: float
    """Mean number of policy versions since the samples were answered."""
    tokens: int
    response_tokens: int
    step_seconds: float
    latency_seconds: float
    """From the last feedback in the batch to the new policy serving."""
    time: float
    of_method: Mapping[str, float] = field(default_factory=dict)
    """Numbers that only the method has."""
    logprob_gaps: Mapping[str, float] = field(default_factory=dict)
    """Differences between the log-probs of sampler and learner; empty if the serving policy answered no turn."""
    of_episodes: Mapping[str, float] = field(default_factory=dict)
    """Numbers about the episodes in the batch; empty if it has none."""
    notes: int = 0
    """Samples that were accepted under notes and are trained on without them."""
    practice: int = 0
    """Samples that nobody asked for, to practise a note."""
    of_guard: Mapping[str, float] = field(default_factory=dict)
    """What the guard found last, before this step."""

    def as_json(self) -> dict[str, float]:
        """Every number by name, the method's among them."""
        values = {name: value for name, value in asdict(self).items() if value is not None}
        parts = [values.pop(name) for name in ("of_method", "logprob_gaps", "of_episodes", "of_guard")]
        return {**values, **{name: value for part in parts for name, value in part.items()}}

    def line(self) -> str:
        return (
            f"step {self.step}: {self.samples} samples "
            f"({self.opd_rl} opd+rl, {self.opd} opd, {self.rl} rl{self._notes()}), "
            f"{self._reward()}{self._episodes()}"
            f"KL {self.kl_old:.4f} by this step and {self.kl_base:.4f} to the base before it, "
            f"clipped {self.clip_fraction:.1%}, gradient {self.grad_norm:.3g}, "
            f"staleness {self.staleness:.1f} versions, "
            f"{self.step_seconds:.1f} s; policy {self.version} serves {self.latency_seconds:.1f} s after the "
            f"{'answers' if self.practice else 'feedback'}"
        )

    def _notes(self) -> str:
        kinds = (("notes", self.notes), ("practice", self.practice))
        return "".join(f", {count} {kind}" for kind, count in kinds if count)

    def _reward(self) -> str:
        return "" if self.reward is None else f"reward {self.reward:+.2f}, "

    def _episodes(self) -> str:
        numbers = self.of_episodes
        if not numbers:
            return ""
        solved = f" ({numbers['solved']:.0%} solved)" if "solved" in numbers else ""
        return f"{numbers['episodes']} episodes{solved} in {numbers['groups']} groups, "


def need(package: str, option: str) -> None:
    """Raise UserError if a package that an option asks for cannot be imported."""
    try:
        file = importlib.import_module(package).__file__
    except ImportError:
        file = None
    # A folder of that name in the current directory, as wandb creates one, is imported as an empty package.
    if file is None:
        raise UserError(f"{option} needs the package: pip install {package}.")


class Sink(Protocol):
    """Receives step reports."""

    def write(self, report: StepReport) -> None: ...


class JsonLines:
    """Appends one JSON object per step to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, report: StepReport) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(report.as_json()) + "\n")


class Prometheus:
    """Gauges of the last step, and totals."""

    def __init__(self, registry: CollectorRegistry, of_method: Sequence[str] = ()) -> None:
        names = ("reward", "loss", "kl_old", "kl_base", "clip_fraction", "grad_norm", "staleness", "latency_seconds")
        self._gauges = {
            name: Gauge(f"openclaw_step_{name}", f"{name} of the last training step.", registry=registry)
            for name in (*names, *of_method, *GAP_NAMES, *EPISODE_METRICS, "step_seconds", "step", "version")
        }
        self._samples = Counter("openclaw_trained_samples", "Samples trained on, by kind.", ["kind"], registry=registry)
        self._tokens = Counter("openclaw_trained_tokens", "Tokens that went through the learner.", registry=registry)

    def write(self, report: StepReport) -> None:
        numbers = report.as_json()
        for name, gauge in self._gauges.items():
            if name in numbers:
                gauge.set(numbers[name])
        for kind in ("opd_rl", "opd", "rl", "notes", "practice"):
            self._samples.labels(kind.replace("_", "+")).inc(getattr(report, kind))
        self._tokens.inc(report.tokens)


class LineSteps:
    """Counts the steps of each line, of a bounded number of lines by name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._steps = Counter("openclaw_line_steps", "Training steps, by line.", ["line"], registry=registry)
        self._named: set[str] = set()

    def of_line(self, name: str) -> "LineSink":
        if len(self._named) < MAX_LINES_SHOWN:
            self._named.add(name)
        return LineSink(self._steps.labels(name if name in self._named else OTHER_LINES))


class LineSink:
    """Counts the steps of one line."""

    def __init__(self, steps: Counter) -> None:
        self._steps = steps

    def write(self, _report: StepReport) -> None:
        self._steps.inc()


class TensorBoard:
    """Scalars for TensorBoard. It uses TensorBoard's own writer, because PyTorch's would load PyTorch."""

    def __init__(self, folder: Path) -> None:
        self.check()
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        folder.mkdir(parents=True, exist_ok=True)
        self._writer = EventFileWriter(str(folder))
        self._event = event_pb2.Event
        self._summary = summary_pb2.Summary

    @staticmethod
    def check() -> None:
        """Raise UserError if it is not installed."""
        need("tensorboard", "--tensorboard")

    def write(self, report: StepReport) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in numbers(report).items()]
        event = self._event(step=report.step, wall_time=report.time, summary=self._summary(value=values))
        self._writer.add_event(event)
        self._writer.flush()


class WeightsAndBiases:
    """A run at Weights & Biases."""

    def __init__(self, project: str, folder: Path, settings: Mapping[str, Any]) -> None:
        self.check()
        import wandb

        # It leaves this machine, and a copy stays in the run directory.
        shown = {name: text_without_accounts(v) if isinstance(v, str) else v for name, v in settings.items()}
        try:
            self._run = wandb.init(project=project, dir=str(folder), config=shown)
        except wandb.Error as error:
            raise ConfigError(
                f"--wandb-project {project}: {error} WANDB_MODE=offline keeps the metrics here."
            ) from None

    @staticmethod
    def check() -> None:
        """Raise UserError if it is not installed."""
        need("wandb", "--wandb-project")

    def write(self, report: StepReport) -> None:
        self._run.log(numbers(report), step=report.step, commit=True)


def numbers(report: StepReport) -> dict[str, float]:
    return {name: value for name, value in report.as_json().items() if name not in ("step", "time")}


class Reporter:
    """Sends each report to all sinks. A sink that fails is logged once and left out; learning continues."""

    def __init__(self, sinks: list[Sink], line: str = "") -> None:
        """`line` is named in the log, if there are several."""
        self.sinks = sinks
        self.line = line

    def write(self, report: StepReport) -> None:
        log.info("%s%s", f"{self.line}, " if self.line else "", report.line())
        gap = report.logprob_gaps.get(MEAN_GAP, 0.0)
        if gap > MAX_MEAN_GAP:
            log.warning(
                "Sampler and learner disagree: their log-probs of the same tokens differ by %.3f on average (more than "
                "%.2f). Use the same model files and --dtype for both.",
                gap,
                MAX_MEAN_GAP,
            )
        for sink in list(self.sinks):
            try:
                sink.write(report)
            except Exception as error:  # noqa: BLE001 - a service may raise anything
                log.warning("Metrics are no longer written to %s: %r", type(sink).__name__, error)
                self.sinks.remove(sink)


def logprob_gaps(turns: Sequence[StoredTurn], learner: Mapping[int, Sequence[float]]) -> dict[str, float]:
    """How far the recorded log-probs of turns are from the learner's own. An older policy's turns must not be given."""
    gaps = [
        abs(recorded - own)
        for turn in turns
        for recorded, own in zip(turn.logprobs, learner.get(turn.number, ()), strict=False)
    ]
    return {MEAN_GAP: fmean(gaps), P99_GAP: float(np.quantile(gaps, 0.99))} if gaps else {}


def make_report(
    step: int,
    version: int,
    before: int,
    turns: Sequence[StoredTurn],
    method: Method,
    result: StepResult,
    constant_groups: int = 0,
    of_guard: Mapping[str, float] | None = None,
    made_from: Sequence[int] | None = None,
) -> StepReport:
    """The report of a step that made policy `version` from policy `before`.

    Where there are several lines, `made_from` has the versions that `before` was made from, and itself.
    """
    versions = range(1, before + 1) if made_from is None else made_from
    kinds = [turn.sample for turn in turns]
    verdicts = [turn.verdict for turn in turns if turn.verdict and turn.verdict.source is not Source.PRACTICE]
    scores = [verdict.score for verdict in verdicts if verdict.score is not None]
    now = time.time()
    return StepReport(
        step=step,
        version=version,
        samples=len(turns),
        opd_rl=kinds.count(SampleKind.OPD_RL),
        opd=kinds.count(SampleKind.OPD),
        rl=kinds.count(SampleKind.RL),
        notes=kinds.count(SampleKind.NOTES),
        practice=kinds.count(SampleKind.PRACTICE),
        reward=fmean(scores) if scores else None,
        loss=result.loss,
        kl_old=result.kl_old,
        kl_base=result.kl_base,
        clip_fraction=result.clip_fraction,
        grad_norm=result.grad_norm,
        staleness=fmean(sum(version > turn.version for version in versions) for turn in turns),
        of_method=method.metrics(turns),
        logprob_gaps=logprob_gaps([turn for turn in turns if turn.version == before], result.before),
        of_episodes=episode_metrics(turns, constant_groups),
        of_guard=of_guard or {},
        tokens=result.tokens,
        response_tokens=result.response_tokens,
        step_seconds=result.seconds,
        latency_seconds=now - max(turn.ready_at or turn.created for turn in turns),
        time=now,
    )


def episode_metrics(turns: Sequence[StoredTurn], constant_groups: int) -> dict[str, float]:
    """Numbers by name; empty if no turn is part of an episode. Each episode counts once, whatever its turns.

    `constant_groups` is how many groups were dropped since the step before, because their rewards were equal.
    """
    episodes = {turn.session: turn.episode for turn in turns if turn.episode is not None}
    if not episodes:
        return {}
    rewards = [episode.reward for episode in episodes.values() if episode.reward is not None]
    solved = [episode.solved for episode in episodes.values() if episode.solved is not None]
    groups = {(key.owner, episode.group) for key, episode in episodes.items() if episode.group is not None}
    return {
        "episodes": len(episodes),
        **({"episode_reward": fmean(rewards)} if rewards else {}),
        **({"solved": fmean(solved)} if solved else {}),
        "groups": len(groups),
        "constant_groups": constant_groups,
    }


class Records:
    """Appends what the samples of a step taught to a file. A failure is logged, and learning continues."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, turns: Sequence[StoredTurn], method: Method) -> None:
        lines = [
            {"step": step, "turn": turn.number, "response": turn.response_ids, **taught}
            for turn in turns
            if (taught := method.record(turn)) is not None
        ]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        except OSError as error:
            log.warning("The records of step %d cannot be written: %s", step, error)


def prune_records(path: Path, kept: Container[int]) -> None:
    """Remove the samples of turns that are not in `kept`, because deleted turns must be in no file.

    A line that cannot be read, such as one that a crash cut off, is removed too.
    """
    if not path.exists():
        return
    lines = [line for line in path.read_text("utf-8", "replace").splitlines(keepends=True) if _turn_in(line) in kept]
    new = path.with_suffix(".new")
    new.write_text("".join(lines), "utf-8")
    new.replace(path)


def _turn_in(line: str) -> int:
    """The turn of a line; -1 if the line cannot be read."""
    try:
        return int(json.loads(line)["turn"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1
