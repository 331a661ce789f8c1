"""The user that a command runs as, and the process that it ends with."""

import os
import signal

from .system import PR_SET_PDEATHSIG, on_linux, prctl

NOBODY = 65534


def leave_root() -> bool:
    """Become nobody if this is root: limits on processes do not apply to root, and root owns most files."""
    if os.getuid() != 0:
        return False
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    return True


def end_with(parent: int) -> None:
    """End when the parent ends. It may have ended already, so check that it is still the same."""
    if on_linux():
        # After the change of the user, which resets it.
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
