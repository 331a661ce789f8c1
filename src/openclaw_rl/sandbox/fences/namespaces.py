"""Namespaces (Linux, where user namespaces are allowed): an empty network of its own, and no privileges."""

import ctypes
import os

from .system import on_linux, syscall

CLONE_NEWIPC = 0x08000000
CLONE_NEWPID = 0x20000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
#: The system call numbers of unshare and capset.
NUMBERS = {"x86_64": (272, 126), "aarch64": (97, 91)}
#: The version of the structures for capset.
CAPABILITY_VERSION = 0x20080522


def raise_namespaces(processes: bool = False, network: bool = False) -> bool:
    """Enter a namespace, without a network unless `network`. False if the kernel or the container forbids it.

    With `processes`, the next child process is the first one of a space of its own: all in it end when that child ends.
    """
    if not on_linux() or os.uname().machine not in NUMBERS:
        return False
    unshare, capset = NUMBERS[os.uname().machine]
    try:
        own_network, own_processes = 0 if network else CLONE_NEWNET, CLONE_NEWPID if processes else 0
        syscall(unshare, CLONE_NEWUSER | CLONE_NEWIPC | own_network | own_processes)
        entered = True
    except OSError:
        entered = False
    # Drop all privileges: the creator of a namespace has them in it, and root has them anyway.
    syscall(capset, (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)())
    return entered
