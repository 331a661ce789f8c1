"""How much memory the server and its worker processes use."""

import os
import re
import resource
import sys
from pathlib import Path

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
