"""The sandbox's child process: raises all fences, then runs the program from standard input."""

import json
import os
import signal
import sys
import sysconfig
import types

from .audit import raise_audit_hook
from .landlock import raise_landlock
from .limits import raise_limits
from .namespaces import raise_namespaces
from .syscalls import raise_seccomp
from .system import PR_SET_PDEATHSIG, on_linux, prctl

#: Files that Python and its libraries may read besides the standard library.
SYSTEM_FILES = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/urandom",
)


def main() -> None:
    """The last argument is JSON with "cpu_seconds", "memory_mib", "parent" and "report"."""
    settings = json.loads(sys.argv[-1])
    source = sys.stdin.buffer.read()
    _forget_parent()
    raised = _raise_fences(settings)
    if settings["report"]:
        sys.stdout.write(json.dumps(raised))
        return
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    exec(compile(source, "<program>", "exec"), program.__dict__)


def _forget_parent() -> None:
    """Remove what the child was started with: environment, arguments and input."""
    os.environ.clear()
    sys.path.pop()
    sys.argv[:] = [""]
    sys.orig_argv.clear()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, sys.stdin.fileno())
    os.close(null)


def _raise_fences(settings: dict[str, int]) -> list[str]:
    library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib")]
    readable = [*library, *SYSTEM_FILES, os.getcwd()]
    raised = ["limits"]
    raised += raise_namespaces()
    if on_linux():
        # After the namespaces, which reset it. The parent may have died before, so check that it is still the same.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != settings["parent"]:
            os._exit(1)
    raise_limits(settings["cpu_seconds"], settings["memory_mib"])
    raised += ["landlock"] if raise_landlock(readable) else []
    raised += ["seccomp"] if raise_seccomp() else []
    raise_audit_hook(readable)
    return [*raised, "audit hook"]
