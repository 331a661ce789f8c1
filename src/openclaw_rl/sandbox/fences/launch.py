"""The sandbox's child process for a command: raises the fences, then becomes the command.

Where there is a namespace for processes, this code stays its first process and the command is the second. The command
can leave its process group, but not the namespace, whose processes all end with the first one.
"""

import json
import os
import signal
import sys
from typing import Any, NoReturn

from .landlock import raise_landlock
from .limited import become
from .limits import MAX_PROCESSES, limit_command
from .namespaces import raise_namespaces
from .syscalls import raise_command_filter
from .system import PR_SET_PDEATHSIG, prctl
from .user import end_with, leave_root

#: Where programs, their libraries and their data are.
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
#: What programs read to use a network.
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates")
READABLE_DEVICES, WRITABLE_DEVICES = ("/dev/urandom", "/dev/zero"), ("/dev/null",)


def main() -> None:
    """The last argument is JSON.

    It has "argv", "cpu_seconds", "memory_mib", "parent", "readable", "runnable" and "report", and may have "scratch", a
    folder for temporary files, and "network".
    """
    settings = json.loads(sys.argv[-1])
    raised = _raise_fences(settings)
    if settings["report"]:
        sys.stdout.write(json.dumps(raised))
        return
    if "namespaces" in raised:
        _become_second_process()
    become(settings["argv"], settings.get("scratch", ""))


def _raise_fences(settings: dict[str, Any]) -> list[str]:
    network = settings.get("network", False)
    raised = ["limits"]
    raised += ["user"] if leave_root() else []
    folders = [os.getcwd(), *filter(None, [settings.get("scratch")])]
    raised += raise_namespaces(processes=True, network=network, writable=folders)
    end_with(settings["parent"])
    # After the namespaces, so that the processes of other sandboxes do not count. Without either of the two, the
    # processes of the user outside of the sandbox would count.
    counted = "namespaces" in raised or "user" in raised
    limit_command(settings["cpu_seconds"], settings["memory_mib"], MAX_PROCESSES if counted else None)
    readable = (*SYSTEM_FILES, *READABLE_DEVICES, *(NETWORK_FILES if network else ()), *settings["readable"])
    runnable = (*PROGRAMS, *settings["runnable"])
    raised += ["landlock"] if raise_landlock(readable, runnable, (*folders, *WRITABLE_DEVICES), network) else []
    # Landlock does not keep a command from changing modes. Read-only mounts do, and so does another user.
    keep_modes = "mounts" not in raised and "user" not in raised
    raised += ["seccomp"] if raise_command_filter(keep_modes=keep_modes, network=network) else []
    return raised


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
