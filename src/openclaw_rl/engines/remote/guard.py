"""Runs a command and ends it, with all processes that it started, when this process' parent is gone.

Used as `python -m openclaw_rl.engines.remote.guard COMMAND…`: the parent holds the other end of standard input. A GPU
server whose owner was killed would otherwise keep its memory for ever.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time

#: Time that the command gets to exit by itself.
EXIT_SECONDS = 10.0
#: How often the command's end is looked for.
POLL_SECONDS = 0.2


def main(command: list[str]) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        while process.poll() is None and not parent_gone():
            pass
    finally:
        end_group(process)
    return process.returncode


def parent_gone() -> bool:
    """Wait a moment for the parent's end of standard input to be closed."""
    readable, _, _ = select.select([sys.stdin], [], [], POLL_SECONDS)
    return bool(readable) and not os.read(sys.stdin.fileno(), 1)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """End the command and whatever it left behind: first politely, then at once."""
    for way, seconds in ((signal.SIGTERM, EXIT_SECONDS), (signal.SIGKILL, EXIT_SECONDS)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, way)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            process.poll()
            try:
                os.killpg(process.pid, 0)
            except ProcessLookupError:
                return
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
