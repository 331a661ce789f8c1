"""A network of its own with nothing in it, and no privileges: what Linux gives where user namespaces are allowed."""

import ctypes
import os

from .system import on_linux, syscall

CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
#: unshare and capset, whose numbers differ by machine.
NUMBERS = {"x86_64": (272, 126), "aarch64": (97, 91)}
#: The version of the structures that capset is given.
CAPABILITIES = 0x20080522


def raise_namespaces() -> bool:
    """Leave the network behind; False where the kernel or the container forbids it."""
    if not on_linux() or os.uname().machine not in NUMBERS:
        return False
    unshare, capset = NUMBERS[os.uname().machine]
    try:
        syscall(unshare, CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC)
        left = True
    except OSError:
        left = False
    # The creator of a namespace has every privilege in it, and root has them anyway.
    syscall(capset, (ctypes.c_uint32 * 2)(CAPABILITIES, 0), (ctypes.c_uint32 * 6)())
    return left
