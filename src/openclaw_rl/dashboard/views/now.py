"""Now: what the server does at the moment, and what the next step waits for."""

import os
import re
import resource
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from openclaw_rl.dashboard.views.turn import STATES
from openclaw_rl.ledger.status import Status
from openclaw_rl.types import NextStep, State

#: The way of a turn, as a picture; dropped turns stand beside it.
WAY = (State.AWAITING, State.READY, State.JUDGED, State.BATCHED, State.APPLIED)


@dataclass(frozen=True, slots=True)
class Tile:
    """A number and what it is."""

    label: str
    value: str
    unit: str = ""


@dataclass(frozen=True, slots=True)
class NowView:
    """What the first view shows."""

    sentence: str
    """What the next step waits for."""
    tiles: tuple[Tile, ...]
    way: tuple[tuple[str, int], ...]
    dropped: int
    dropped_reasons: Mapping[str, int]
    next_step: NextStep | None = None
    alerts: tuple[tuple[str, str], ...] = ()
    """(heading, sentence)."""
    practice: str = ""
    """What is being practised, as a sentence."""
    quarantined: list[tuple[int, int, str]] = field(default_factory=list)
    """(step, turns, reason)."""

    @property
    def progress(self) -> int:
        """The next step's progress in percent."""
        if self.next_step is None or not self.next_step.needed:
            return 0
        return min(100, round(100 * self.next_step.samples / self.next_step.needed))


def now_view(
    status: Status, tiles: tuple[Tile, ...], next_step: NextStep | None, detail: str = "", *, is_operator: bool = True
) -> NowView:
    """`detail` says why the engine is not ready; empty if it is. Reasons are for the operator: they may quote users."""
    counts = status.counts
    heads = (
        ("The engine is not ready.", detail),
        ("Nothing is recorded.", status.suspended or ""),
        ("The judge cannot be asked.", status.judge_down or ""),
        ("Judging.", status.trouble if is_operator else ""),
    )
    practice = status.practice if is_operator else None
    return NowView(
        status.waiting_for,
        tiles,
        tuple((STATES[state], counts.states[state]) for state in WAY),
        counts.states[State.DROPPED],
        counts.dropped if is_operator else {},
        next_step,
        tuple((head, sentence) for head, sentence in heads if sentence),
        f"Note {practice.note} {practice.words}." if practice else "",
        [(batch.step, len(batch.turns), batch.reason) for batch in status.quarantined] if is_operator else [],
    )


def amount(number: float) -> str:
    """A number with at most three digits that matter."""
    if number >= 100 or number == int(number):
        return f"{number:,.0f}".replace(",", "\u2009")
    return f"{number:.1f}" if number >= 10 else f"{number:.2f}"


def size(number: float) -> tuple[str, str]:
    """A number of bytes, and its unit."""
    for unit in ("B", "KB", "MB"):
        if number < 1000:
            return amount(round(number, 1)), unit
        number /= 1000
    return amount(round(number, 1)), "GB"


PROC = Path("/proc")
_PSS = re.compile(r"^Pss:\s+(\d+) kB", re.MULTILINE)


def memory_bytes() -> int:
    """The memory of this process and its children; where there is no /proc, the most that this process has used."""
    if not (PROC / "self" / "smaps_rollup").exists():
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
    return sum(map(_share, (os.getpid(), *_children(os.getpid()))))


def _share(process: int) -> int:
    """A process's memory; what several processes share, such as weights, is divided among them."""
    try:
        found = _PSS.search((PROC / str(process) / "smaps_rollup").read_text())
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0


def _children(process: int) -> list[int]:
    try:
        tasks = list((PROC / str(process) / "task").iterdir())
        direct = [int(child) for task in tasks for child in (task / "children").read_text().split()]
    except (OSError, ValueError):
        return []
    return [process for child in direct for process in (child, *_children(child))]
