"""The sandbox's child: raises all fences around itself, then runs the program that it was given on standard input."""

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

#: What Python and the libraries that it is linked to may read, besides the standard library.
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
    """Takes {"cpu_seconds", "memory_mib", "parent", "report"} as JSON in the last argument."""
    wanted = json.loads(sys.argv[-1])
    source = sys.stdin.buffer.read()
    _forget_parent()
    held = _raise_fences(wanted)
    if wanted["report"]:
        sys.stdout.write(json.dumps(held))
        return
    program = types.ModuleType("__main__")
    sys.modules["__main__"] = program
    exec(compile(source, "<program>", "exec"), program.__dict__)


def _forget_parent() -> None:
    """Nothing is left of what the child was started with: environment, arguments, input."""
    os.environ.clear()
    sys.path.pop()
    sys.argv[:] = [""]
    sys.orig_argv.clear()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, sys.stdin.fileno())
    os.close(nothing)


def _raise_fences(wanted: dict[str, int]) -> list[str]:
    library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib")]
    readable = [*library, *SYSTEM_FILES, os.getcwd()]
    held = ["limits"]
    held += ["namespaces"] if raise_namespaces() else []
    if on_linux():
        # After the namespaces, which forget it. Whoever dies before is no parent any more.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != wanted["parent"]:
            os._exit(1)
    raise_limits(wanted["cpu_seconds"], wanted["memory_mib"])
    held += ["landlock"] if raise_landlock(readable) else []
    held += ["seccomp"] if raise_seccomp() else []
    raise_audit_hook(readable)
    return [*held, "audit hook"]
