"""Whether two processes can see each other: the same machine, and the same process ids."""

import functools
import os
import uuid
from pathlib import Path

BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESS_IDS = "/proc/self/ns/pid"


@functools.cache
def host_id() -> str:
    """The same for all processes on this machine that see each other. Containers on one machine have different ones."""
    try:
        return f"{BOOT.read_text().strip()} {os.readlink(PROCESS_IDS)}"
    except OSError:
        return f"{uuid.getnode():x}"
