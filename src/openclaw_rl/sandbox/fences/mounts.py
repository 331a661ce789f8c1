"""Read-only mounts (Linux, in a namespace of its own): nothing can be changed but some folders, not even modes."""

import os
import struct
from collections.abc import Sequence

from .system import syscall

#: The system call number of mount.
MOUNT = {"x86_64": 165, "aarch64": 40}
MOUNT_SETATTR = 442
MS_BIND, MS_REC, MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
RDONLY = 1


def raise_read_only(writable: Sequence[str]) -> bool:
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
