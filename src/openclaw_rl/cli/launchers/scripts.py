"""The scripts in `launch/`: what each runs, and the options that it sets unless a variable or a flag does."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

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
