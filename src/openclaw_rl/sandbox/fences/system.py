"""System calls that Python has no functions for."""

import ctypes
import os
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_NO_NEW_PRIVS = 38


def prctl(option: int, *arguments: Any) -> None:
    """Linux's prctl. Raises OSError."""
    padded = [*arguments, 0, 0, 0, 0][:4]
    checked(libc().prctl(option, *(_wide(argument) for argument in padded)))


def syscall(number: int, *arguments: Any) -> int:
    """A system call by its number. Raises OSError."""
    return checked(libc().syscall(ctypes.c_long(number), *(_wide(argument) for argument in arguments)))


def checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def on_linux() -> bool:
    return sys.platform == "linux"


def libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _wide(argument: Any) -> Any:
    """A number as wide as a register. ctypes would pass a plain int as 32 bits, with undefined upper bits."""
    return ctypes.c_ulong(argument) if isinstance(argument, int) else argument
