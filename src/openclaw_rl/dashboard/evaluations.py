"""What was measured of a run's policies: lines that `demo` and `eval` add to a file of the run directory."""

import json
import os
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

FILE = "evaluations.jsonl"
#: At most so much is read, from the end of the file.
MAX_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How many cases a policy passed."""

    version: int
    what: str
    """The simulated person whose wishes were examined, or the task."""
    passed: int
    cases: int
    created: float = field(default_factory=time.time)

    @property
    def share(self) -> float:
        return self.passed / self.cases


def record_evaluations(run_dir: Path, evaluations: Iterable[Evaluation]) -> None:
    """Add lines to the run's file, which only its owner can read. Raises OSError."""
    lines = "".join(json.dumps(asdict(evaluation)) + "\n" for evaluation in evaluations)
    opened = os.open(run_dir / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(opened, "w", encoding="utf-8") as file:
        file.write(lines)


def read_evaluations(run_dir: Path | None) -> list[Evaluation]:
    """What the run's file says, in the order of its lines. Lines that cannot be read are left out."""
    if run_dir is None:
        return []
    try:
        with (run_dir / FILE).open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - MAX_BYTES))
            lines = file.read(MAX_BYTES).splitlines()
    except OSError:
        return []
    return [evaluation for line in lines if (evaluation := _read(line))]


def _read(line: bytes) -> Evaluation | None:
    try:
        given = json.loads(line)
        version, passed, cases = (given[name] for name in ("version", "passed", "cases"))
        is_sound = all(type(number) is int for number in (version, passed, cases)) and 0 <= passed <= cases > 0
        return Evaluation(version, str(given["what"]), passed, cases, float(given["created"])) if is_sound else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
