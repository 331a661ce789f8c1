"""The learner's metrics of each step in a run directory, as far as they can be read."""

import json
import math
from dataclasses import dataclass, fields
from pathlib import Path

from openclaw_rl.learn.reporting import EPISODE_METRICS, GAP_NAMES, StepReport

FILE = "metrics.jsonl"
METRICS = frozenset(field.name for field in fields(StepReport)) | {*EPISODE_METRICS, *GAP_NAMES}


@dataclass(frozen=True, slots=True)
class Metrics:
    """The steps of a run, by number. A step that was repeated is there once, as it was made last."""

    steps: list[dict[str, float]]
    unreadable: int
    """Lines that are not a step, for example because the disk was full."""


def read_metrics(path: Path) -> Metrics:
    """All lines that can be read; none if there is no file. The last line may be half written."""
    try:
        lines = path.read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return Metrics([], 0)
    written = [line for line in lines if line.strip()]
    steps = [step for step in map(read_step, written) if step]
    by_number = {step["step"]: step for step in steps}
    return Metrics([by_number[number] for number in sorted(by_number)], len(written) - len(steps))


def read_step(line: str) -> dict[str, float] | None:
    """The metrics of a step; None if the line is not one."""
    try:
        given = json.loads(line)
        kept = {name: float(value) for name, value in given.items() if name in METRICS and value is not None}
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return None
    return kept if math.isfinite(kept.get("step", math.nan)) else None
