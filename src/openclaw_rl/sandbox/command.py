"""Runs a command in a folder of its own, for tools whose arguments a model chose.

- The command is a list of arguments. No shell reads it.
- On Linux with Landlock it reads and runs only system programs and what it is given, and writes only in its folder.
- It has no network: no socket can be made (seccomp), and where user namespaces are allowed there is no network device.
- Where user namespaces allow it, all files outside of its folder are read-only, also for changes of modes and owners.
- Started by root, it runs as nobody. Otherwise, without read-only files, it cannot change the mode, owner and
  attributes of any file (seccomp).
- Everywhere: limits on CPU time, wall time, memory of a process, output and size of a file; an empty environment. With
  user namespaces or started by root, also a limit on the number of processes.
- At its end its process group is killed. Where user namespaces are allowed, everything that it started ends with it;
  elsewhere a process that left the group can live on until its CPU time is used up. So shells need user namespaces.

`command_fences` lists what holds on this machine; `missing_fences` says what would be needed.
"""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from openclaw_rl.sandbox.base import give_folder
from openclaw_rl.sandbox.fences.kernel import on_linux
from openclaw_rl.sandbox.programs import MAX_OUTPUT, ProgramOutcome, start, to_its_end, watch


async def run_command(
    argv: Sequence[str],
    folder: Path,
    *,
    stdin: bytes = b"",
    seconds: float = 10.0,
    memory_mib: int = 512,
    max_output: int = MAX_OUTPUT,
    readable: Sequence[Path] = (),
    runnable: Sequence[Path] = (),
) -> ProgramOutcome:
    """Run a command to its end or its limits. With user namespaces, its processes are gone at the end of this call."""
    give_folder(folder)
    paths = {"readable": list(map(str, readable)), "runnable": list(map(str, runnable))}
    settings = {"argv": list(argv), "memory_mib": memory_mib, **paths}
    held = "namespaces" in command_fences()
    return await to_its_end(
        start("run_command", settings, stdin, seconds, folder), seconds, max_output, held_by_child=held
    )


@functools.cache
def command_fences() -> tuple[str, ...]:
    """The fences around commands on this machine, by a trial run: limits, user, namespaces, mounts, landlock, …"""
    settings = {"argv": [], "memory_mib": 512, "readable": [], "runnable": [], "report": True}
    with tempfile.TemporaryDirectory(prefix="openclaw-sandbox-") as folder:
        give_folder(Path(folder))
        outcome = watch(start("run_command", settings, b"", 10, folder), 10, MAX_OUTPUT)
    return tuple(json.loads(outcome.stdout)) if outcome.exit_code == 0 else ()


def missing_fences(*, hold_processes: bool = False) -> str:
    """What this machine lacks for running commands, in words; empty if nothing.

    With `hold_processes`, everything that a command starts has to end with it.
    """
    if not on_linux():
        return "Linux"
    fences = command_fences()
    if "landlock" not in fences:
        return "Landlock, which limits files (Linux 5.13 or newer)"
    if "seccomp" not in fences and "namespaces" not in fences:
        return "seccomp or user namespaces, which remove the network"
    if "namespaces" not in fences and hold_processes:
        return "user namespaces, which end all processes of a shell with it"
    if "namespaces" not in fences and "user" not in fences:
        return "user namespaces, which hold a command's processes (or start as root)"
    return ""
