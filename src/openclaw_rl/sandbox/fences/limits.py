"""Resource limits that the kernel enforces on a process, on every Unix."""

import contextlib
import resource

MIB = 1 << 20
#: Three for standard input and output, and some for imports.
MAX_OPEN_FILES = 32
#: Limits of a command: processes, open files, and MiB of one written file.
MAX_PROCESSES, MAX_OPEN_FILES_OF_A_COMMAND, MAX_FILE_MIB = 64, 256, 64


def raise_limits(cpu_seconds: int, memory_mib: int) -> None:
    """Set every limit that this system has. macOS accepts the memory limit but does not enforce it."""
    memory = memory_mib * MIB
    limits = {
        "RLIMIT_CPU": cpu_seconds,
        "RLIMIT_AS": memory,
        "RLIMIT_DATA": memory,
        "RLIMIT_CORE": 0,
        # No file can grow. Pipes are not affected.
        "RLIMIT_FSIZE": 0,
        "RLIMIT_NOFILE": MAX_OPEN_FILES,
        "RLIMIT_MEMLOCK": 0,
        "RLIMIT_MSGQUEUE": 0,
        # Counts all processes of the user, so with this one no other can be started. Does not apply to root.
        "RLIMIT_NPROC": 1,
    }
    for name, value in limits.items():
        # This system may lack the limit, or it may be lower already.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))


def limit_command(cpu_seconds: int, memory_mib: int, processes: int | None) -> None:
    """Set the limits of a command, which may write files and start processes; None: no limit on processes."""
    limits = {
        "RLIMIT_CPU": cpu_seconds,
        "RLIMIT_AS": memory_mib * MIB,
        "RLIMIT_CORE": 0,
        "RLIMIT_FSIZE": MAX_FILE_MIB * MIB,
        "RLIMIT_NOFILE": MAX_OPEN_FILES_OF_A_COMMAND,
    }
    if processes is not None:
        limits["RLIMIT_NPROC"] = processes
    for name, value in limits.items():
        # macOS does not take every limit.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))
