"""Seccomp: allows the system calls that a program needs to compute, read and print. The kernel refuses all others.

Without sockets, clone, exec and writable files there is no network, no second process or thread, and no way to change
anything outside. This holds for root, in containers, and against machine code.
"""

import ctypes
import errno
import os
import struct
from collections.abc import Callable, Sequence

from .kernel import PR_SET_NO_NEW_PRIVS, on_linux, prctl

PR_SET_SECCOMP, MODE_FILTER = 22, 2

#: For each machine the kernel's number for it, and its column in the table.
MACHINES = {"x86_64": (0xC000003E, 1), "aarch64": (0xC00000B7, 2)}

#: Name, number on x86_64, number on aarch64.
HARMLESS = """
    read 0 63, write 1 64, close 3 57, fstat 5 80, lseek 8 62, mmap 9 222, mprotect 10 226, munmap 11 215, brk 12 214,
    rt_sigaction 13 134, rt_sigprocmask 14 135, rt_sigreturn 15 139, pread64 17 67, readv 19 65, writev 20 66,
    poll 7 -, ppoll 271 73, select 23 -, pselect6 270 72, sched_yield 24 124, mremap 25 216, madvise 28 233,
    dup 32 23, dup2 33 -, dup3 292 24, nanosleep 35 101, clock_nanosleep 230 115, getitimer 36 102, setitimer 38 103,
    alarm 37 -, pause 34 -, getpid 39 172, getppid 110 173, gettid 186 178, exit 60 93, exit_group 231 94,
    uname 63 160, getdents64 217 61, getcwd 79 17, chdir 80 49, fchdir 81 50, readlink 89 -, readlinkat 267 78,
    stat 4 -, lstat 6 -, newfstatat 262 79, statx 332 291, access 21 -, faccessat 269 48, faccessat2 439 439,
    sysinfo 99 179, times 100 153, time 201 -, getuid 102 174, geteuid 107 175, getgid 104 176, getegid 108 177,
    getgroups 115 158, getresuid 118 148, getresgid 120 150, getrlimit 97 163, getrusage 98 165, gettimeofday 96 169,
    clock_gettime 228 113, clock_getres 229 114, futex 202 98, sched_getaffinity 204 123, getcpu 309 168,
    getrandom 318 278, sigaltstack 131 132, restart_syscall 219 128, membarrier 324 283, getpgid 121 155, getpgrp 111 -,
    getsid 124 156
"""
OPEN, OPENAT = "open 2 -", "openat 257 56"
FCNTL, PRLIMIT = "fcntl 72 25", "prlimit64 302 261"
SIGNALS = ("kill 62 129", "tgkill 234 131")
#: Flags of `open` that write, create or truncate a file.
WRITING = (
    os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_TMPFILE", 0) & ~getattr(os, "O_DIRECTORY", 0)
)
#: F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Others can send signals to other processes.
FCNTL_COMMANDS = (0, 1, 2, 3, 4, 1030)

SOCKETS = "socket 41 198"
#: How else a command could reach other processes: io_uring, which makes sockets too, and tracing.
OTHER_PROCESSES = "io_uring_setup 425 425, ptrace 101 117, process_vm_writev 311 271"
#: How a command could change the mode, owner and attributes of files that it cannot write. Landlock allows it.
MODES = """
    chmod 90 -, fchmod 91 52, fchmodat 268 53, fchmodat2 452 452, chown 92 -, fchown 93 55, lchown 94 -,
    fchownat 260 54, setxattr 188 5, lsetxattr 189 6, fsetxattr 190 7, setxattrat 463 463, removexattr 197 14,
    lremovexattr 198 15, fremovexattr 199 16, removexattrat 466 466
"""
SECOND_SET = 0x40000000

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EACCES
#: Offsets of the call's number, the machine, and the first argument.
NUMBER_AT, MACHINE_AT, ARGUMENTS_AT = 0, 4, 16


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_void_p))


def apply_seccomp() -> bool:
    """Refuse every other system call from now on. False if the machine or the kernel does not support it."""
    return _apply(lambda machine: _filter(machine, os.getpid()))


def apply_command_filter(keep_modes: bool, network: bool = False) -> bool:
    """Refuse what reaches other processes from now on. False if the machine or the kernel does not support it.

    Sockets are allowed with `network` only. With `keep_modes`, also refuse to change the mode, owner and attributes of
    files.
    """
    calls = [OTHER_PROCESSES, *([] if network else [SOCKETS]), *([MODES] if keep_modes else [])]
    return _apply(lambda machine: _without(",".join(calls), machine))


def _apply(make_filter: Callable[[str], list[bytes]]) -> bool:
    if not on_linux() or os.uname().machine not in MACHINES or struct.calcsize("P") != 8:
        return False
    steps = make_filter(os.uname().machine)
    code = ctypes.create_string_buffer(b"".join(steps))
    program = _Program(len(steps), ctypes.addressof(code))
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    try:
        prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.byref(program))
    except OSError:  # a kernel without it
        return False
    return True


def _filter(machine: str, process: int) -> list[bytes]:
    name, column = MACHINES[machine]
    steps = [_step(LOAD, MACHINE_AT), _step(EQUAL, name, if_true=1), _step(RETURN, KILL), _step(LOAD, NUMBER_AT)]
    rules = [(row, [_step(RETURN, ALLOW)]) for row in HARMLESS.split(",")]
    rules += [(OPEN, _read_only(1)), (OPENAT, _read_only(2))]
    rules += [(FCNTL, _one_of(1, FCNTL_COMMANDS))]
    rules += [(row, _one_of(0, [process])) for row in SIGNALS]
    # A process may read its own limits: the process id and the pointer to new limits, in two halves, must be 0.
    rules += [(PRLIMIT, [*_must_be_zero(0), *_must_be_zero(2), *_must_be_zero(2.5), _step(RETURN, ALLOW)])]
    for row, action in rules:
        number = row.split()[column]
        if number != "-":
            steps += [_step(EQUAL, int(number), if_false=len(action)), *action]
    return [*steps, _step(RETURN, REFUSE)]


def _without(calls: str, machine: str) -> list[bytes]:
    name, column = MACHINES[machine]
    steps = [_step(LOAD, MACHINE_AT), _step(EQUAL, name, if_true=1), _step(RETURN, KILL), _step(LOAD, NUMBER_AT)]
    # The second set of numbers on x86_64, through which the same calls can be made.
    steps += [_step(AT_LEAST, SECOND_SET, if_false=1), _step(RETURN, REFUSE)]
    for row in calls.split(","):
        number = row.split()[column]
        if number != "-":
            steps += [_step(EQUAL, int(number), if_false=1), _step(RETURN, REFUSE)]
    return [*steps, _step(RETURN, ALLOW)]


def _step(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """One instruction of the filter. `if_true` and `if_false` are how many instructions to skip."""
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _argument(place: float) -> bytes:
    """Load the low half of an argument; at `place` + 0.5, its high half."""
    return _step(LOAD, ARGUMENTS_AT + int(8 * place))


def _read_only(place: int) -> list[bytes]:
    return [_argument(place), _step(ANY_BIT, WRITING, if_false=1), _step(RETURN, REFUSE), _step(RETURN, ALLOW)]


def _one_of(place: int, values: Sequence[int]) -> list[bytes]:
    tests = [step for value in values for step in (_step(EQUAL, value, if_false=1), _step(RETURN, ALLOW))]
    return [_argument(place), *tests, _step(RETURN, REFUSE)]


def _must_be_zero(place: float) -> list[bytes]:
    return [_argument(place), _step(EQUAL, 0, if_true=1), _step(RETURN, REFUSE)]
