"""Limits of time, memory and counts that the kernel holds a process to, on every Unix."""

import contextlib
import resource

MIB = 1 << 20
#: The library needs a few while it imports; standard input and output are three.
OPEN_FILES = 32


def raise_limits(cpu_seconds: int, memory_mib: int) -> None:
    """Set what can be set here; macOS takes the limit of memory and does not hold to it."""
    memory = memory_mib * MIB
    wanted = {
        "RLIMIT_CPU": cpu_seconds,
        "RLIMIT_AS": memory,
        "RLIMIT_DATA": memory,
        "RLIMIT_CORE": 0,
        # No file can grow; pipes are no files.
        "RLIMIT_FSIZE": 0,
        "RLIMIT_NOFILE": OPEN_FILES,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        # Counted over all processes of a user, who has this one: no other can be made. Root is not held to it.
        "RLIMIT_NPROC": 1,
    }
    for name, value in wanted.items():
        # One that this system lacks, or that is lower already.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))
