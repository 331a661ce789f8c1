"""Runs a command and ends it, with all processes that it started, when this process' parent is gone.

Used as `python -m openclaw_rl.engines.remote.guard COMMAND…`: the parent holds the other end of standard input. A GPU
server whose owner was killed would otherwise keep its memory for ever.

- The command's output goes to standard error. Standard output gets its process id, which is also that of its group: if
  this process is killed, the parent ends the group.
- If this process and its parent are killed, the kernel asks the command to end.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

from openclaw_rl.sandbox.fences.kernel import PR_SET_PDEATHSIG, on_linux, prctl

#: Time that the command gets to exit by itself.
EXIT_SECONDS = 10.0
#: How often the command's end is looked for.
POLL_SECONDS = 0.2


def main(command: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True, preexec_fn=end_with_guard
    )
    try:
        sys.stdout.write(f"{process.pid}\n")
        sys.stdout.flush()
        while process.poll() is None and not parent_gone():
            pass
    finally:
        end_group(process.pid, process.poll)
    return process.returncode


def end_with_guard() -> None:
    if on_linux():
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def parent_gone() -> bool:
    """Wait a moment for the parent's end of standard input to be closed."""
    readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def end_group(group: int, reap: Callable[[], object] = lambda: None) -> None:
    """End the command and whatever it left behind: first politely, then at once. `reap` looks after its own child."""
    for way, seconds in ((signal.SIGTERM, EXIT_SECONDS), (signal.SIGKILL, EXIT_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, way)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            reap()
            try:
                os.killpg(group, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
