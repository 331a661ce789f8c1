"""The scripts in `launch/`: what each runs, and the options that it sets unless a variable or a flag does."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from openclaw_rl.app.config import FIELDS
from openclaw_rl.config.options import ConfigError, option_of
from openclaw_rl.models import CLOUD_MODEL

#: The rank of the adapter in scripts that train one. The others train all weights, as their originals do.
LORA_RANK = "32"
#: The options of each method, by the word that stands for it in the names of scripts.
METHODS: Mapping[str, Mapping[str, str]] = {
    "rl": {"method": "rl"},
    "opd": {"method": "opd"},
    "combine": {"method": "combine"},
    "opd_topk": {"method": "topk-select", "w_rl": "0", "topk_max_cand": "1"},
    "topk_select": {"method": "topk-select", "eps_clip": "0.2", "eps_clip_high": "0.28"},
}
#: slime's own servers, and a server of the base model that judges and teaches.
SLIME = {
    "learner": "slime",
    "sampler": "sglang",
    "sglang_url": "http://127.0.0.1:30100",
    "teacher_url": "http://127.0.0.1:30200",
}
ENVIRONMENTS = ("terminal", "gui", "swe", "toolcall")


class Runs(StrEnum):
    """What a script runs."""

    SERVER = "serve"
    EPISODES = "rollout"
    EVALUATION = "eval"


@dataclass(frozen=True, slots=True)
class Script:
    """A script, by its file's name without the ending."""

    name: str
    runs: Runs
    defaults: Mapping[str, str]
    """Options by name."""
    needs_model: bool = False
    """Whether the model has to be named."""


def _servers() -> list[Script]:
    scripts = []
    for method, options in METHODS.items():
        for ending, rank in (("", "0"), ("_lora", LORA_RANK)):
            name = f"qwen3_4b_openclaw_{method}{ending}"
            defaults = {"model_name": CLOUD_MODEL, "run_dir": f"runs/{name}", "lora_rank": rank, **options}
            scripts.append(Script(f"run_{name}", Runs.SERVER, defaults))
    for method in ("rl", "opd", "combine"):
        for middle, rank in (("", "0"), ("lora_", LORA_RANK)):
            name = f"qwen3_7b_{middle}openclaw_{method}"
            defaults = {"run_dir": f"runs/{name}", "lora_rank": rank, **METHODS[method]}
            scripts.append(Script(f"run_{name}", Runs.SERVER, defaults, needs_model=True))
    for method in ("rl", "opd", "combine"):
        name = f"slime_openclaw_{method}"
        defaults = {"model_name": CLOUD_MODEL, "run_dir": f"runs/{name}", "lora_rank": "0", **METHODS[method], **SLIME}
        scripts.append(Script(f"run_{name}", Runs.SERVER, defaults))
    return scripts


SCRIPTS: dict[str, Script] = {
    script.name: script
    for script in (
        *_servers(),
        *(Script(f"run_{name}_rl", Runs.EPISODES, {"env": name}) for name in ENVIRONMENTS),
        Script("run_eval", Runs.EVALUATION, {}),
    )
}


#: Runs the server of another script as a job of a Ray cluster, whose workers are actors of the cluster.
RAY_SCRIPT = "run_ray"
#: How long `ray job stop` waits before it kills a server, which has to save a checkpoint. Ray's own default is 3 s.
RAY_STOP_SECONDS = {"RAY_JOB_STOP_WAIT_TIME_S": "120"}


def inner_script(flags: Sequence[str]) -> str:
    """The script that is to run on the cluster: the first word after the launcher. Raises ConfigError."""
    name = flags[0].removesuffix(".sh") if flags else ""
    if name not in SCRIPTS or SCRIPTS[name].runs is not Runs.SERVER:
        servers = ", ".join(script.name for script in SCRIPTS.values() if script.runs is Runs.SERVER)
        raise ConfigError(f"{RAY_SCRIPT}.sh needs the name of the server to run as its first argument: {servers}.")
    return name


def ray_job(command: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The command that submits a server to the cluster at RAY_ADDRESS, with the variables that its options read.

    Keys are not among them, because Ray shows the variables of a job to everybody: set them on the cluster.
    """
    on_ray = [] if "--launcher" in command else ["--launcher", "ray"]
    read = (name for field in FIELDS.values() if not option_of(field).secret for name in option_of(field).env)
    variables = {name: environment[name] for name in read if environment.get(name)}
    settings = json.dumps({"env_vars": {**RAY_STOP_SECONDS, **variables}})
    return ["ray", "job", "submit", "--runtime-env-json", settings, "--", "openclaw-rl", *command, *on_ray]


def find_ray() -> str:
    """Where the program `ray` is. Raises ConfigError."""
    if path := shutil.which("ray"):
        return path
    raise ConfigError("There is no program ray: pip install 'openclaw-rl[ray]'.")
