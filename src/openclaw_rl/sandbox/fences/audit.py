"""Python's audit hook: refuses forbidden actions inside Python.

It is the only such fence where the kernel has none, as on macOS. It stops ordinary programs; one that runs machine code
gets past it, and then only the kernel's fences are left.
"""

import os
import sys
from collections.abc import Sequence

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


def raise_audit_hook(readable: Sequence[str]) -> None:
    """Refuse forbidden actions from now on. Only files below `readable` can be opened, and only for reading."""
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
