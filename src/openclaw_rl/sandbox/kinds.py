"""The sandboxes (bubblewrap, our fences, containers, none), and which of them is used on this machine."""

import contextlib
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.config.options import ConfigError
from openclaw_rl.sandbox.base import Allowance, Sandbox, give_folder, new_name, new_scratch_folder, remove_folder
from openclaw_rl.sandbox.command import command_fences, missing_fences
from openclaw_rl.sandbox.fences.kernel import MAX_FILE_MIB, MAX_PROCESSES, MIB, NOBODY
from openclaw_rl.sandbox.fences.run_command import NETWORK_FILES, PATH, PROGRAMS, SYSTEM_FILES, variables
from openclaw_rl.sandbox.programs import MAX_OUTPUT, launcher, start_program, watch

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
        return launcher("run_command", settings, allowance.cpu_seconds)


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
    return launcher("run_command", settings, allowance.cpu_seconds, main="main_limited")


#: What --sandbox takes.
AUTO = "auto"
BUBBLEWRAP = "bubblewrap"
FENCES = "fences"
CONTAINERS = ("docker", "podman")
#: How long a sandbox may take to run the trial; a container's image may have to be loaded.
TRIAL_SECONDS = 60
#: What the trial prints if the sandbox works.
WORKS = "sandbox works"
WITHOUT_SANDBOX = "--unsafe-no-sandbox runs commands without one."


def choose_sandbox(wanted: str = AUTO, allow_none: bool = False, image: str = DEFAULT_IMAGE) -> Sandbox:
    """The sandbox of that name, tried by a run. Raises ConfigError if it does not work here.

    "auto" is bubblewrap if it works, else the project's own fences if they hold, else none if that is allowed.
    """
    if wanted not in (AUTO, BUBBLEWRAP, FENCES, *CONTAINERS):
        known = ", ".join((AUTO, BUBBLEWRAP, FENCES, *CONTAINERS))
        raise ConfigError(f"There is no sandbox {wanted!r}; there are {known}.")
    problems = []
    for name in (BUBBLEWRAP, FENCES) if wanted == AUTO else (wanted,):
        if not (problem := problem_with(name, image)):
            return make_sandbox(name, image)
        problems.append(problem)
    if wanted == AUTO and allow_none:
        return OpenSandbox()
    if wanted == AUTO:
        raise ConfigError(
            f"Commands of the model cannot be confined on this machine: {'; '.join(problems)}. Install bubblewrap, or "
            f"use --sandbox docker. {WITHOUT_SANDBOX}"
        )
    raise ConfigError(f"--sandbox {wanted} does not work on this machine: {problems[0]}.")


def make_sandbox(name: str, image: str) -> Sandbox:
    if name in CONTAINERS:
        return ContainerSandbox(name, image)
    return BubblewrapSandbox() if name == BUBBLEWRAP else FencedSandbox()


@functools.cache
def problem_with(name: str, image: str = DEFAULT_IMAGE) -> str:
    """Why a sandbox does not work on this machine, as part of a sentence; empty if it works."""
    program = "bwrap" if name == BUBBLEWRAP else name
    if name == FENCES:
        if missing := missing_fences(hold_processes=True):
            return f"the project's own fences need {missing}"
    elif shutil.which(program) is None:
        return f"{program} is not installed"
    if shutil.which("bash") is None and name not in CONTAINERS:
        return "bash is not installed"
    printed = trial(make_sandbox(name, image))
    return "" if printed == WORKS else f"{program} cannot run a shell ({printed or 'it prints nothing'})"


def trial(sandbox: Sandbox, script: str = f"echo {WORKS} > file && cat file") -> str:
    """What a script of bash prints inside: on its standard output, else on its standard error. Blocks."""
    scratch = new_scratch_folder()
    try:
        with tempfile.TemporaryDirectory(prefix="openclaw-trial-") as folder:
            give_folder(Path(folder))
            allowance = Allowance(Path(folder), scratch, TRIAL_SECONDS, name=new_name())
            command = sandbox.command_line(["bash", "-c", script], allowance)
            outcome = watch(start_program(command, b"", folder), TRIAL_SECONDS, MAX_OUTPUT, sandbox.held_by_child)
            sandbox.end(allowance)
    except OSError as error:
        return str(error)
    finally:
        remove_folder(scratch)
    return (outcome.stdout or outcome.stderr).strip()[-200:]
