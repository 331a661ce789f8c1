"""The sandboxes: bubblewrap, the project's own fences, containers, and none."""

import contextlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.sandbox.base import Allowance, Sandbox
from openclaw_rl.sandbox.command import command_fences
from openclaw_rl.sandbox.fences.launch import NETWORK_FILES, PROGRAMS, SYSTEM_FILES
from openclaw_rl.sandbox.fences.limited import PATH, variables
from openclaw_rl.sandbox.fences.limits import MAX_FILE_MIB, MAX_PROCESSES, MIB
from openclaw_rl.sandbox.fences.user import NOBODY
from openclaw_rl.sandbox.run import launcher

#: Processes of all programs without a sandbox together, where root started them.
MAX_OPEN_PROCESSES = 512
#: How long a container runtime may take to remove a container.
REMOVE_SECONDS = 20
#: The image of a container, unless a task names one.
DEFAULT_IMAGE = "debian:stable"


class BubblewrapSandbox(Sandbox):
    """bubblewrap: namespaces of its own for files, processes, users and the network.

    - Programs see system programs, what is readable, and their folder, and change only the last.
    - Everything that a program started ends with it.
    - At most 64 processes.
    """

    name = "bubblewrap"
    about = "bubblewrap (own namespaces for files, processes, network)"
    held_by_child = True

    def command_line(self, argv: Sequence[str], allowance: Allowance) -> list[str]:
        folder = str(allowance.folder)
        flags = ["--unshare-all", "--new-session", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"]
        flags += ["--share-net"] if allowance.network else []
        for path in PROGRAMS:
            if Path(path).is_symlink():
                flags += ["--symlink", os.readlink(path), path]
            else:
                flags += ["--ro-bind-try", path, path]
        for path in (*SYSTEM_FILES, *(NETWORK_FILES if allowance.network else ())):
            flags += ["--ro-bind-try", path, path]
        flags += ["--bind", str(allowance.scratch), "/tmp"]
        for readable in allowance.readable:
            flags += ["--ro-bind", str(readable), str(readable)]
        flags += ["--bind", folder, folder, "--chdir", folder]
        for name, value in {"PATH": PATH, **variables(folder, "/tmp")}.items():
            flags += ["--setenv", name, value]
        # Inside, so that the processes of other sandboxes do not count.
        limited = ["bash", "-c", f'ulimit -u {MAX_PROCESSES} && exec "$@"', "bash", *argv]
        return limited_launcher(["bwrap", *flags, "--", *limited], allowance, None)


class FencedSandbox(Sandbox):
    """The project's own fences, as `sandbox.command` describes them, on a machine with user namespaces."""

    name = "fences"
    held_by_child = True

    def __init__(self) -> None:
        fences = command_fences()
        self.about = f"fences ({', '.join(fences)})"
        self.changes_modes = "user" in fences or "mounts" in fences

    def command_line(self, argv: Sequence[str], allowance: Allowance) -> list[str]:
        readable = [str(path) for path in allowance.readable]
        settings = {
            "argv": list(argv),
            "memory_mib": allowance.memory_mib,
            "readable": readable,
            "runnable": [*readable, str(allowance.folder)],
            "scratch": str(allowance.scratch),
            "network": allowance.network,
        }
        return launcher("launch", settings, allowance.cpu_seconds)


@dataclass(frozen=True)
class ContainerSandbox(Sandbox):
    """docker or podman: each program and each shell has a container of its own, which is removed at its end.

    - The image's files are read-only. Programs change only their folder, which has the same path inside.
    - No capabilities, no new privileges, at most 64 processes, a limit on the memory of all together.
    """

    name: str
    image: str = DEFAULT_IMAGE

    @property
    def about(self) -> str:  # type: ignore[override]
        return f"{self.name}, image {self.image}"

    def command_line(self, argv: Sequence[str], allowance: Allowance) -> list[str]:
        folder = str(allowance.folder)
        user = f"{NOBODY}:{NOBODY}" if os.getuid() == 0 else f"{os.getuid()}:{os.getgid()}"
        flags = ["--rm", "-i", "--name", allowance.name, "--read-only", "--tmpfs", "/tmp"]
        flags += ["--cap-drop", "ALL", "--security-opt", "no-new-privileges", "--user", user]
        flags += ["--userns", "keep-id"] if self.name == "podman" and os.getuid() != 0 else []
        flags += ["--pids-limit", str(MAX_PROCESSES), "--memory", f"{allowance.memory_mib}m"]
        flags += ["--ulimit", f"cpu={int(allowance.cpu_seconds) + 1}", "--ulimit", f"fsize={MAX_FILE_MIB * MIB}"]
        flags += [] if allowance.network else ["--network", "none"]
        for readable in allowance.readable:
            flags += ["--volume", f"{readable}:{readable}:ro"]
        flags += ["--volume", f"{folder}:{folder}", "--workdir", folder]
        for name, value in variables(folder, "/tmp").items():
            flags += ["--env", f"{name}={value}"]
        return [*self._runtime(), "run", *flags, self.image, *argv]

    def end(self, allowance: Allowance) -> None:
        # The end of the client does not end the container.
        remove = [*self._runtime(), "rm", "--force", allowance.name]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(remove, capture_output=True, check=False, timeout=REMOVE_SECONDS)

    def _runtime(self) -> list[str]:
        # Programs are started without an environment, and the runtime needs its own.
        needed = {name: value for name, value in os.environ.items() if name in RUNTIME_VARIABLES}
        return ["env", *(f"{name}={value}" for name, value in needed.items()), self.name]


#: Variables that tell a container runtime where it is and what it may use.
RUNTIME_VARIABLES = ("PATH", "HOME", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "XDG_RUNTIME_DIR")


class OpenSandbox(Sandbox):
    """No sandbox: limits and, started by root, another user. Programs reach the network and the files of that user."""

    name = "none"
    about = "NO SANDBOX: commands of the model reach your files and the network"

    def command_line(self, argv: Sequence[str], allowance: Allowance) -> list[str]:
        return limited_launcher(argv, allowance, MAX_OPEN_PROCESSES if os.getuid() == 0 else None)


def limited_launcher(argv: Sequence[str], allowance: Allowance, max_processes: int | None) -> list[str]:
    """The command line that leaves root, sets limits and becomes a program."""
    settings = {
        "argv": list(argv),
        "memory_mib": allowance.memory_mib,
        "max_processes": max_processes,
        "scratch": str(allowance.scratch),
    }
    return launcher("limited", settings, allowance.cpu_seconds)
