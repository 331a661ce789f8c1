"""What a process can find out about its machine: its identity, its addresses, and the memory that is left."""

import contextlib
import fcntl
import functools
import os
import socket
import struct
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESS_IDS = "/proc/self/ns/pid"
LOOPBACK = {"darwin": "lo0"}.get(sys.platform, "lo")
#: Whether processes of this machine can open each other's weights.
SHARES_MEMORY = hasattr(os, "memfd_create")
#: Linux's request for the address of an interface.
SIOCGIFADDR = 0x8915
#: A struct ifreq: the interface's name, and a socket address whose last four bytes of eight are the IPv4 address.
REQUEST = "256s"


@functools.cache
def host_id() -> str:
    """The same for all processes on this machine that see each other. Containers on one machine have different ones."""
    try:
        return f"{BOOT.read_text().strip()} {os.readlink(PROCESS_IDS)}"
    except OSError:
        return f"{uuid.getnode():x}"


def address_of(descriptor: int) -> str:
    """The address of this end of a connection."""
    with socket.socket(fileno=os.dup(descriptor)) as end:
        return str(end.getsockname()[0])


def interface_of(host: str) -> str:
    """The name of the interface with this IPv4 address; empty if it cannot be found."""
    if host.startswith("127."):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack(REQUEST, name.encode()))
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return ""


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
