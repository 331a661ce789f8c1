"""How much memory this process may still take, also in a container whose memory is limited."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Where one version of Linux's control groups says what a group may use and uses, in bytes."""

    folder: str
    limit: str
    used: str
    #: The line of memory.stat with the part of what is used that is given up when memory is needed: cached files.
    cached: str


V1 = ControlGroups("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
V2 = ControlGroups("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file")


def usable_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take.

    On Linux the memory that is available, or less where a control group of this process has less left; elsewhere the
    memory of the machine. `root` is the folder with `proc` and `sys`.
    """
    available = read_numbers(root / "proc/meminfo").get("MemAvailable:")
    machine = available * 1024 if available is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(0, min([machine, *left_in_groups(root)]))


def left_in_groups(root: Path) -> Iterator[int]:
    """What is left of each limit on this process: those of its control groups and of the groups around them."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        groups = V1 if controllers else V2
        # In a container the path may be one of the host, which is not there; its own group is then the topmost one.
        inner = PurePosixPath(*(part for part in path.split("/") if part not in ("", "..")))
        for group in (inner, *inner.parents):
            left = left_in_group(root / groups.folder / group, groups)
            if left is not None:
                yield left


def left_in_group(folder: Path, groups: ControlGroups) -> int | None:
    """None if the group has no limit, or does not exist."""
    limit, used = (read_text(folder / name).strip() for name in (groups.limit, groups.used))
    if not (limit.isdecimal() and used.isdecimal()):
        return None
    return int(limit) - int(used) + read_numbers(folder / "memory.stat").get(groups.cached, 0)


def read_numbers(path: Path) -> dict[str, int]:
    """A file with a name and a number in each line."""
    lines = (line.split() for line in read_text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def read_text(path: Path) -> str:
    """Empty if it cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
