"""The sandbox's child process for a command: applies the fences, then becomes the command.

Where there is a namespace for processes, this code stays its first process and the command is the second. The command
can leave its process group, but not the namespace, whose processes all end with the first one.
"""

import json
import os
import signal
import sys
from typing import Any, NoReturn

from .kernel import (
    MAX_PROCESSES,
    PR_SET_PDEATHSIG,
    apply_landlock,
    apply_namespaces,
    end_with,
    leave_root,
    limit_command,
    prctl,
)
from .syscalls import apply_command_filter

#: Where programs, their libraries and their data are.
PROGRAMS = ("/usr", "/bin", "/sbin", "/lib", "/lib64")
SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
#: What programs read to use a network.
NETWORK_FILES = ("/etc/resolv.conf", "/etc/hosts", "/etc/nsswitch.conf", "/etc/ssl", "/etc/ca-certificates")
READABLE_DEVICES = ("/dev/urandom", "/dev/zero")
WRITABLE_DEVICES = ("/dev/null",)
#: Where a command is looked for.
PATH = "/usr/local/bin:/usr/bin:/bin"
#: The exit status when the command cannot be started, as in a shell.
CANNOT_START = 127


def main() -> None:
    """The last argument is JSON.

    It has "argv", "cpu_seconds", "memory_mib", "parent", "readable", "runnable" and "report", and may have "scratch", a
    folder for temporary files, and "network".
    """
    settings = json.loads(sys.argv[-1])
    applied = _apply_fences(settings)
    if settings["report"]:
        sys.stdout.write(json.dumps(applied))
        return
    if "namespaces" in applied:
        _become_second_process()
    become(settings["argv"], settings.get("scratch", ""))


def _apply_fences(settings: dict[str, Any]) -> list[str]:
    network = settings.get("network", False)
    applied = ["limits"]
    applied += ["user"] if leave_root() else []
    folders = [os.getcwd(), *filter(None, [settings.get("scratch")])]
    applied += apply_namespaces(processes=True, network=network, writable=folders)
    end_with(settings["parent"])
    # After the namespaces, so that the processes of other sandboxes do not count. Without either of the two, the
    # processes of the user outside of the sandbox would count.
    counted = "namespaces" in applied or "user" in applied
    limit_command(settings["cpu_seconds"], settings["memory_mib"], MAX_PROCESSES if counted else None)
    readable = (*SYSTEM_FILES, *READABLE_DEVICES, *(NETWORK_FILES if network else ()), *settings["readable"])
    runnable = (*PROGRAMS, *settings["runnable"])
    applied += ["landlock"] if apply_landlock(readable, runnable, (*folders, *WRITABLE_DEVICES), network) else []
    # Landlock does not keep a command from changing modes. Read-only mounts do, and so does another user.
    keep_modes = "mounts" not in applied and "user" not in applied
    applied += ["seccomp"] if apply_command_filter(keep_modes=keep_modes, network=network) else []
    return applied


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


def main_limited() -> None:
    """For a program that confines itself, such as bubblewrap: leave root, set limits, become it.

    Nothing here keeps a program from the files and the network of its user. The last argument is JSON: "argv",
    "cpu_seconds", "memory_mib", "max_processes", "parent", "scratch".
    """
    settings = json.loads(sys.argv[-1])
    leave_root()
    end_with(settings["parent"])
    limit_command(settings["cpu_seconds"], settings["memory_mib"], settings["max_processes"])
    become(settings["argv"], settings["scratch"])


def become(argv: list[str], scratch: str) -> None:
    """Become a command with an environment of its own; its home is the working folder."""
    try:
        os.execvpe(argv[0], argv, {"PATH": PATH, **variables(os.getcwd(), scratch or os.getcwd())})
    except OSError as error:
        sys.stderr.write(f"{cannot_start(argv[0])}{error.strerror}.\n")
        sys.stderr.flush()
        os._exit(CANNOT_START)


def variables(home: str, scratch: str) -> dict[str, str]:
    """The environment of a command besides PATH."""
    # Git stops if the machine has settings of its own that it may not read.
    return {"HOME": home, "LANG": "C.UTF-8", "TMPDIR": scratch, "GIT_CONFIG_NOSYSTEM": "1"}


def cannot_start(program: str) -> str:
    """The beginning of the message when the command cannot be started."""
    return f"{program} cannot be started: "
