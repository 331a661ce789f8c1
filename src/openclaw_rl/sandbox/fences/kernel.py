"""What the kernel enforces on a process: its user, resource limits, namespaces, read-only mounts, and Landlock.

Each function that applies a fence says whether this system has it. Seccomp has a module of its own, `syscalls`.
"""

import contextlib
import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38


def prctl(option: int, *arguments: Any) -> None:
    """Linux's prctl. Raises OSError."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    checked(libc().prctl(option, *(_wide(argument) for argument in padded)))


def syscall(number: int, *arguments: Any) -> int:
    """A system call by its number. Raises OSError."""
    return checked(libc().syscall(ctypes.c_long(number), *(_wide(argument) for argument in arguments)))


def checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def on_linux() -> bool:
    return sys.platform == "linux"


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _wide(argument: Any) -> Any:
    """A number as wide as a register. ctypes would pass an int as 32 bits, with undefined upper bits."""
    return ctypes.c_ulong(argument) if isinstance(argument, int) else argument


#: The user that a command runs as if root starts it.
NOBODY = 65534


def leave_root() -> bool:
    """Become nobody if this is root: limits on processes do not apply to root, and root owns most files."""
    if os.getuid() != 0:
        return False
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    return True


def end_with(parent: int) -> None:
    """End when the parent ends. It may have ended already, so check that it is still the same."""
    if on_linux():
        # After the change of the user, which resets it.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


MIB = 1 << 20
#: Three for standard input and output, and some for imports.
MAX_OPEN_FILES = 32
#: Limits of a command: processes, open files, and MiB of one written file.
MAX_PROCESSES = 64
MAX_OPEN_FILES_OF_A_COMMAND = 256
MAX_FILE_MIB = 64


def apply_limits(cpu_seconds: int, memory_mib: int) -> None:
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
    _set_limits(limits)


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
    _set_limits(limits)


def _set_limits(limits: dict[str, int]) -> None:
    for name, value in limits.items():
        # This system may lack the limit, or it may be lower already.
        with contextlib.suppress(AttributeError, ValueError, OSError):
            resource.setrlimit(getattr(resource, name), (value, value))


CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
#: The system call numbers of unshare and capset.
NUMBERS = {"x86_64": (272, 126), "aarch64": (97, 91)}
#: The version of the structures for capset.
CAPABILITY_VERSION = 0x20080522


def apply_namespaces(
    processes: bool = False, network: bool = False, writable: Sequence[str] | None = None
) -> list[str]:
    """Enter a namespace, without a network unless `network`. Which fences were applied: "namespaces", "mounts".

    Neither if the kernel or the container forbids it. With `processes`, the next child process is the first one of a
    new space: all in it end when that child ends. With `writable`, only these folders can be changed.
    """
    if not on_linux() or os.uname().machine not in NUMBERS:
        return []
    unshare, capset = NUMBERS[os.uname().machine]
    applied = []
    try:
        spaces = CLONE_NEWUSER | CLONE_NEWIPC
        spaces |= 0 if network else CLONE_NEWNET
        spaces |= CLONE_NEWPID if processes else 0
        spaces |= 0 if writable is None else CLONE_NEWNS
        syscall(unshare, spaces)
        applied.append("namespaces")
    except OSError:
        pass
    if applied and writable is not None and apply_read_only(writable):
        applied.append("mounts")
    # Drop all privileges: the creator of a namespace has them in it, and root has them anyway.
    syscall(capset, (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    return applied


#: The system call number of mount.
MOUNT = {"x86_64": 165, "aarch64": 40}
MOUNT_SETATTR = 442
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
RDONLY = 1


def apply_read_only(writable: Sequence[str]) -> bool:
    """Make all files read-only but those in some folders. False if the container forbids it.

    The process must be in a mount namespace of its own, with its privileges.
    """
    mount = MOUNT[os.uname().machine]
    try:
        syscall(mount, None, b"/", None, MS_REC | MS_PRIVATE, None)
        for path in writable:
            syscall(mount, path.encode(), path.encode(), None, MS_BIND, None)
    except OSError:
        return False
    _set("/", AT_RECURSIVE, add=RDONLY)
    for path in writable:
        _set(path, 0, remove=RDONLY)
    # The working folder is still the one below the new mount.
    os.chdir(os.getcwd())
    return True


def _set(path: str, flags: int, add: int = 0, remove: int = 0) -> None:
    attributes = struct.pack("=4Q", add, remove, 0, 0)
    syscall(MOUNT_SETATTR, AT_FDCWD, path.encode(), flags, attributes, len(attributes))


#: System calls of Landlock (Linux 5.13 and newer).
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_VERSION = 1
PATH_BENEATH = 1
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
#: The kinds of access that a file can have; the others are for folders.
OF_FILES = EXECUTE | 1 << 1 | READ_FILE | 1 << 14 | 1 << 15
#: The number of kinds of file access in each version, counted from bit 0.
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
#: Binding and connecting TCP sockets, since version 4.
TCP, TCP_SINCE = 0b11, 4
#: Abstract Unix sockets of other processes, and signals to them, since version 6.
SCOPES, SCOPES_SINCE = 0b11, 6


def apply_landlock(
    readable: Sequence[str], runnable: Sequence[str] = (), writable: Sequence[str] = (), network: bool = False
) -> bool:
    """From now on allow only these files and folders to be read, read and run, or read and written.

    TCP is allowed with `network` only. False if the kernel has no Landlock.
    """
    version = _version()
    if not version:
        return False
    all_rights = (1 << FILE_RIGHTS[min(version, max(FILE_RIGHTS))]) - 1
    attributes = [all_rights]
    attributes += [0 if network else TCP] if version >= TCP_SINCE else []
    attributes += [SCOPES] if version >= SCOPES_SINCE else []
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    ruleset = syscall(CREATE_RULESET, ctypes.create_string_buffer(packed, len(packed)), len(packed), 0)
    read = READ_FILE | READ_DIR
    for paths, rights in ((readable, read), (runnable, read | EXECUTE), (writable, all_rights & ~EXECUTE)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                _allow(ruleset, path, rights)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return True


def _version() -> int:
    """The version of the kernel's Landlock; 0 if there is none or it is turned off."""
    if not on_linux():
        return 0
    try:
        return syscall(CREATE_RULESET, None, 0, ASK_VERSION)
    except OSError:
        return 0


def _allow(ruleset: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & OF_FILES, opened)
    syscall(ADD_RULE, ruleset, PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0)
    os.close(opened)
