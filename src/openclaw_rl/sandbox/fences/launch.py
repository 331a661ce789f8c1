"""The sandbox's child process for a command: raises the fences, then becomes the command.

Where there is a namespace for processes, this code stays its first process and the command is the second. The command
can leave its process group, but not the namespace, whose processes all end with the first one.
"""

import json
import os
import resource
import signal
import sys
from typing import Any, NoReturn

from .landlock import raise_landlock
from .namespaces import raise_namespaces
from .syscalls import raise_no_sockets
from .system import PR_SET_PDEATHSIG, on_linux, prctl

#: Where programs, their libraries and their data are.
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime", "/dev/urandom", "/dev/zero")
DEVICES = ("/dev/null",)
NOBODY = 65534
#: Where a command is looked for.
PATH = "/usr/local/bin:/usr/bin:/bin"
MIB = 1 << 20
#: Limits of a command: processes, open files, and MiB of one written file.
MAX_PROCESSES, MAX_OPEN_FILES, MAX_FILE_MIB = 64, 256, 64
#: The exit status when the command cannot be started, as in a shell.
CANNOT_START = 127


def main() -> None:
    """The last argument is JSON: "argv", "cpu_seconds", "memory_mib", "parent", "readable", "runnable", "report"."""
    settings = json.loads(sys.argv[-1])
    raised = _raise_fences(settings)
    if settings["report"]:
        sys.stdout.write(json.dumps(raised))
        return
    if "namespaces" in raised:
        _become_second_process()
    argv = settings["argv"]
    environment = {"PATH": PATH, "HOME": os.getcwd(), "LANG": "C.UTF-8"}
    try:
        os.execvpe(argv[0], argv, environment)
    except OSError as error:
        sys.stderr.write(f"{cannot_start(argv[0])}{error.strerror}.\n")
        os._exit(CANNOT_START)


def cannot_start(program: str) -> str:
    """The beginning of the message when the command cannot be started."""
    return f"{program} cannot be started: "


def _raise_fences(settings: dict[str, Any]) -> list[str]:
    raised = ["limits"]
    if os.getuid() == 0:
        # The limit on processes does not apply to root, and root owns most files.
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        raised.append("user")
    raised += ["namespaces"] if raise_namespaces(processes=True) else []
    _end_with(settings["parent"])
    # After the namespaces, so that the processes of other sandboxes do not count.
    _limit(settings["cpu_seconds"], settings["memory_mib"], "namespaces" in raised)
    readable, runnable = (*SYSTEM_FILES, *settings["readable"]), (*PROGRAMS, *settings["runnable"])
    raised += ["landlock"] if raise_landlock(readable, runnable, (os.getcwd(), *DEVICES)) else []
    raised += ["seccomp"] if raise_no_sockets(keep_modes="user" not in raised) else []
    return raised


def _end_with(parent: int) -> None:
    """End when the parent ends. It may have ended already, so check that it is still the same."""
    if on_linux():
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def _limit(cpu_seconds: int, memory_mib: int, own_processes: bool) -> None:
    limits = {
        resource.RLIMIT_CPU: cpu_seconds,
        resource.RLIMIT_AS: memory_mib * MIB,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: MAX_FILE_MIB * MIB,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
    }
    if own_processes or os.getuid() == NOBODY:
        limits[resource.RLIMIT_NPROC] = MAX_PROCESSES
    for limit, value in limits.items():
        resource.setrlimit(limit, (value, value))


def _become_second_process() -> None:
    """Continue as the second process of the new namespace. This process and the first one wait and end as it does."""
    first = os.fork()
    if first != 0:
        _end_as(first)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    command = os.fork()
    if command != 0:
        _end_as(command)


def _end_as(child: int) -> NoReturn:
    """Wait for a child process, and for others that this process inherited meanwhile; end with the child's status."""
    ended = 0
    while ended != child:
        ended, status = os.wait()
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)
