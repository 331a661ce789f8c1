"""What `--dtype auto` stands for on this CPU: bfloat16 where its products are faster and right, else float32.

A short measurement decides. It is kept in a file, so that later starts decide alike: those on the same kind of
processor, with as many threads and the same PyTorch. A file that cannot be read or written counts as none.
"""

import contextlib
import hashlib
import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch

from openclaw_rl.engines.local.model.narrow_products import Measurement, measure
from openclaw_rl.models import BadModelFolder, read_json_object

#: bfloat16 is chosen if its products are so many times as fast.
LEAST_SPEEDUP = 1.3
#: Results may be wrong by this share of the largest one. Rounding to 8 bits gives at most 0.004, sums in bfloat16 0.06.
MAX_ERROR = 0.01
FILE = "cpu-precision.json"
CPU_INFO = Path("/proc/cpuinfo")
#: The lines of that file that say which processor it is and what it can do, on x86 and on Arm.
CPU_LINES = ("model name", "flags", "CPU implementer", "CPU part", "CPU variant", "Features")


class ChosenDtype(NamedTuple):
    """A precision, and why it was chosen."""

    dtype: str
    reason: str = ""


def choose_on_cpu(cache: Path | None, *, keep: bool = True) -> ChosenDtype:
    """Decide by the measurement in the cache folder, or by a new one, which goes there if `keep` is set."""
    file = None if cache is None else cache / FILE
    known, here = {} if file is None else read(file), machine()
    if here in known:
        return choice_of(known[here])
    try:
        measurement = measure()
    except RuntimeError as error:
        return ChosenDtype("float32", f"bfloat16 cannot be computed here: {str(error).partition(chr(10))[0]}")
    if file is not None and keep:
        write(file, {**known, here: measurement})
    return choice_of(measurement)


def choice_of(measurement: Measurement) -> ChosenDtype:
    if not measurement.error <= MAX_ERROR:
        return ChosenDtype("float32", "bfloat16 gives wrong products here")
    dtype = "bfloat16" if measurement.speedup >= LEAST_SPEEDUP else "float32"
    return ChosenDtype(dtype, f"bfloat16 is {measurement.speedup:.2g} × as fast as float32 here")


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


def read(file: Path) -> dict[str, Measurement]:
    """The measurements in a file, by machine; without those that are damaged."""
    try:
        content = read_json_object(file)
    except BadModelFolder:
        return {}
    known = {}
    for name, values in content.items():
        with contextlib.suppress(TypeError, ValueError, AttributeError, KeyError):
            speedups = {case: float(ratio) for case, ratio in values["speedups"].items()}
            if speedups and min(speedups.values()) > 0:
                known[name] = Measurement(speedups, float(values["error"]))
    return known


def write(file: Path, measurements: dict[str, Measurement]) -> None:
    """Replace the file in one go, because several processes may start at once."""
    unfinished = file.with_name(f"{file.name}.{os.getpid()}")
    content = {name: asdict(measurement) for name, measurement in measurements.items()}
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(content, indent=1) + "\n")
        unfinished.replace(file)
