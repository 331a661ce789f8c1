"""The sandbox's child process: applies all fences, then runs the program from standard input."""

import json
import os
import sys
import sysconfig
import types
from collections.abc import Sequence

from .kernel import apply_landlock, apply_limits, apply_namespaces, end_with
from .syscalls import apply_seccomp

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
#: Flags of `open` that write or create a file.
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: All events that begin with one of these are refused.
REFUSED = (
    "socket.",
    "subprocess.",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.startfile",
    "os.system",
    "os.kill",
    "signal.pthread_kill",
    "os.chflags",
    "os.chmod",
    "os.chown",
    "os.link",
    "os.lockf",
    "os.mkdir",
    "os.remove",
    "os.removexattr",
    "os.rename",
    "os.rmdir",
    "os.setxattr",
    "os.symlink",
    "os.truncate",
    "os.utime",
    "shutil.",
    "tempfile.",
    "ctypes.",
    "sqlite3.",
    "pty.",
    "resource.",
    "syslog.",
)


def main() -> None:
    """The last argument is JSON with "cpu_seconds", "memory_mib", "parent" and "report"."""
    settings = json.loads(sys.argv[-1])
    source = sys.stdin.buffer.read()
    _forget_parent()
    applied = _apply_fences(settings)
    if settings["report"]:
        sys.stdout.write(json.dumps(applied))
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


def _apply_fences(settings: dict[str, int]) -> list[str]:
    library = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), os.path.join(sys.base_prefix, "lib")]
    readable = [*library, *SYSTEM_FILES, os.getcwd()]
    applied = ["limits"]
    applied += apply_namespaces()
    # After the namespaces, which reset it.
    end_with(settings["parent"])
    apply_limits(settings["cpu_seconds"], settings["memory_mib"])
    applied += ["landlock"] if apply_landlock(readable) else []
    applied += ["seccomp"] if apply_seccomp() else []
    apply_audit_hook(readable)
    return [*applied, "audit hook"]


def apply_audit_hook(readable: Sequence[str]) -> None:
    """Refuse forbidden actions inside Python from now on: only files below `readable` can be opened, for reading.

    It is the only such fence where the kernel has none, as on macOS. It stops ordinary programs; one that runs machine
    code gets past it, and then only the kernel's fences are left.
    """
    # Local copies, which the program cannot change through a module.
    refused, writing = REFUSED, WRITING
    roots = tuple(os.path.realpath(path) for path in readable)
    realpath, separator, text, number = os.path.realpath, os.sep, os.fspath, int

    def readable_file(path: object) -> bool:
        if isinstance(path, number):
            return True
        name = text(path)  # type: ignore[call-overload]
        real = realpath(name.decode(errors="surrogateescape") if isinstance(name, bytes) else name)
        return any(real == root or real.startswith(root + separator) for root in roots)

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(refused):
            raise PermissionError(f"The sandbox refuses {event}.")
        if event == "open":
            path, _, flags = arguments
            if (isinstance(flags, number) and flags & writing) or not readable_file(path):
                raise PermissionError("The sandbox opens only Python's own files, for reading.")

    sys.addaudithook(hook)
