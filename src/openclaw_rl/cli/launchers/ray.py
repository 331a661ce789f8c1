"""The launcher for a Ray cluster: another script's server as a job, whose workers are actors of the cluster."""

import json
import shutil
from collections.abc import Mapping, Sequence

from openclaw_rl.app.config import FIELDS
from openclaw_rl.cli.launchers.scripts import SCRIPTS, Runs
from openclaw_rl.config.options import ConfigError, option_of

NAME = "run_ray"
#: How long `ray job stop` waits before it kills a server, which has to save a checkpoint. Ray's own default is 3 s.
STOP_SECONDS = {"RAY_JOB_STOP_WAIT_TIME_S": "120"}


def inner_script(flags: Sequence[str]) -> str:
    """The script that is to run on the cluster: the first word after the launcher. Raises ConfigError."""
    name = flags[0].removesuffix(".sh") if flags else ""
    if name not in SCRIPTS or SCRIPTS[name].runs is not Runs.SERVER:
        servers = ", ".join(script.name for script in SCRIPTS.values() if script.runs is Runs.SERVER)
        raise ConfigError(f"{NAME}.sh needs the name of the server to run as its first argument: {servers}.")
    return name


def job(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command that submits a server to the cluster at RAY_ADDRESS, with the variables that its options read.

    Keys are not among them, because Ray shows the variables of a job to everybody: set them on the cluster.
    """
    on_ray = [] if "--launcher" in command else ["--launcher", "ray"]
    read = (name for field in FIELDS.values() if not option_of(field).secret for name in option_of(field).env)
    variables = {name: environment[name] for name in read if environment.get(name)}
    settings = json.dumps({"env_vars": {**STOP_SECONDS, **variables}})
    return ["ray", "job", "submit", "--runtime-env-json", settings, "--", "openclaw-rl", *command, *on_ray]


def check_installed() -> str:
    """Where the program `ray` is. Raises ConfigError."""
    if path := shutil.which("ray"):
        return path
    raise ConfigError("There is no program ray: pip install 'openclaw-rl[ray]'.")
