"""Landlock (Linux 5.13 and newer): limits which files can be read, run and written; newer kernels forbid TCP too."""

import contextlib
import ctypes
import os
import struct
from collections.abc import Sequence

from .system import PR_SET_NO_NEW_PRIVS, on_linux, prctl, syscall

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
ASK_VERSION = 1
PATH_BENEATH = 1
EXECUTE, READ_FILE, READ_DIR = 1 << 0, 1 << 2, 1 << 3
#: The kinds of access that a file can have; the others are for folders.
OF_FILES = EXECUTE | 1 << 1 | READ_FILE | 1 << 14 | 1 << 15
#: The number of kinds of file access in each version, counted from bit 0.
FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
#: Binding and connecting TCP sockets, since version 4.
TCP, TCP_SINCE = 0b11, 4
#: Abstract Unix sockets of other processes, and signals to them, since version 6.
SCOPES, SCOPES_SINCE = 0b11, 6


def raise_landlock(
    readable: Sequence[str], runnable: Sequence[str] = (), writable: Sequence[str] = (), network: bool = False
) -> bool:
    """From now on allow only these files and folders to be read, read and run, or read and written.

    TCP is allowed with `network` only. False if the kernel has no Landlock.
    """
    version = _version()
    if not version:
        return False
    all_rights = (1 << FILE_RIGHTS[min(version, max(FILE_RIGHTS))]) - 1
    attributes = [all_rights]
    attributes += [0 if network else TCP] if version >= TCP_SINCE else []
    attributes += [SCOPES] if version >= SCOPES_SINCE else []
    packed = struct.pack(f"={len(attributes)}Q", *attributes)
    ruleset = syscall(CREATE_RULESET, ctypes.create_string_buffer(packed, len(packed)), len(packed), 0)
    read = READ_FILE | READ_DIR
    for paths, rights in ((readable, read), (runnable, read | EXECUTE), (writable, all_rights & ~EXECUTE)):
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                _allow(ruleset, path, rights)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    syscall(RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
    return True


def _version() -> int:
    """The version of the kernel's Landlock; 0 if there is none or it is turned off."""
    if not on_linux():
        return 0
    try:
        return syscall(CREATE_RULESET, None, 0, ASK_VERSION)
    except OSError:
        return 0


def _allow(ruleset: int, path: str, rights: int) -> None:
    opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    rule = struct.pack("=Qi", rights if os.path.isdir(path) else rights & OF_FILES, opened)
    syscall(ADD_RULE, ruleset, PATH_BENEATH, ctypes.create_string_buffer(rule, len(rule)), 0)
    os.close(opened)
