"""Which sandbox is used: what was asked for, or the first one that works on this machine."""

import functools
import shutil
import tempfile
from pathlib import Path

from openclaw_rl.config.options import ConfigError
from openclaw_rl.sandbox.base import Allowance, Sandbox, give_folder, new_name, new_scratch_folder, remove_folder
from openclaw_rl.sandbox.command import missing_fences
from openclaw_rl.sandbox.kinds import DEFAULT_IMAGE, BubblewrapSandbox, ContainerSandbox, FencedSandbox, OpenSandbox
from openclaw_rl.sandbox.run import MAX_OUTPUT, start_program, watch

#: What --sandbox takes.
AUTO, BUBBLEWRAP, FENCES, CONTAINERS = "auto", "bubblewrap", "fences", ("docker", "podman")
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
