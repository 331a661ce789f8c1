"""Python's audit hook: refuses what Python itself is asked to do.

The only fence of its kind where the kernel has none, as on macOS. It stops programs that do not know better; one that
reaches machine code gets around it, and then meets the fences of the kernel alone.
"""

import os
import sys
from collections.abc import Sequence

#: Flags of open that write or make a file.
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
#: Events of which every one is refused, by how they begin.
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
    """Refuse from now on; files only below `readable` can be opened, and only to be read."""
    # Copies that the program cannot reach by changing a module.
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
                raise PermissionError("The sandbox opens Python's own files only, to be read.")

    sys.addaudithook(hook)
