"""Namespaces (Linux, where user namespaces are allowed): an empty network of its own, and no privileges."""

import ctypes
import os
from collections.abc import Sequence

from .mounts import raise_read_only
from .system import on_linux, syscall

CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWNS = 0x00020000
#: The system call numbers of unshare and capset.
NUMBERS = {"x86_64": (272, 126), "aarch64": (97, 91)}
#: The version of the structures for capset.
CAPABILITY_VERSION = 0x20080522


def raise_namespaces(
    processes: bool = False, network: bool = False, writable: Sequence[str] | None = None
) -> list[str]:
    """Enter a namespace, without a network unless `network`. Which fences were raised: "namespaces", "mounts".

    None if the kernel or the container forbids it. With `processes`, the next child process is the first one of a space
    of its own: all in it end when that child ends. With `writable`, only these folders can be changed.
    """
    if not on_linux() or os.uname().machine not in NUMBERS:
        return []
    unshare, capset = NUMBERS[os.uname().machine]
    raised = []
    try:
        own_network, own_processes = 0 if network else CLONE_NEWNET, CLONE_NEWPID if processes else 0
        own_mounts = 0 if writable is None else CLONE_NEWNS
        syscall(unshare, CLONE_NEWUSER | CLONE_NEWIPC | own_network | own_processes | own_mounts)
        raised.append("namespaces")
    except OSError:
        pass
    if raised and writable is not None and raise_read_only(writable):
        raised.append("mounts")
    # Drop all privileges: the creator of a namespace has them in it, and root has them anyway.
    syscall(capset, (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    return raised
