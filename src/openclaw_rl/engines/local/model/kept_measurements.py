"""What was measured of this machine, in files that are kept, so that later starts decide alike.

A file that cannot be read or written counts as none.
"""

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from openclaw_rl.models import BadModelFolder, read_json_object

CPU_INFO = Path("/proc/cpuinfo")
#: The lines of that file that say which processor it is and what it can do, on x86 and on Arm.
CPU_LINES = ("model name", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")


def machine() -> str:
    """What a measurement is true for: the processor with its instructions, the number of threads, and PyTorch."""
    about = dict.fromkeys(CPU_LINES, "")
    with contextlib.suppress(OSError):
        for line in CPU_INFO.read_text().partition("\n\n")[0].splitlines():
            name, _, value = line.partition(":")
            if name.strip() in about:
                about[name.strip()] = value.strip()
    name = about["model name"] or platform.processor() or platform.machine()
    abilities = "\n".join([*about.values(), torch.backends.cpu.get_cpu_capability()])
    digest = hashlib.sha256(abilities.encode()).hexdigest()[:12]
    return f"{name} ({digest}), {torch.get_num_threads()} threads, PyTorch {torch.__version__}"


def read(file: Path | None) -> dict[str, Any]:
    """What a file has; nothing without a file."""
    if file is None:
        return {}
    try:
        return read_json_object(file)
    except BadModelFolder:
        return {}


def write(file: Path | None, content: Mapping[str, Any]) -> None:
    """Replace the file in one go, because several processes may start at once."""
    if file is None:
        return
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(file)
