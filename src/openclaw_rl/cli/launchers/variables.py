"""The variables and flags of the published scripts: which option of ours each means, and in which scripts.

Variables that the options themselves name, as docs/options.md lists them, need no entry here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from openclaw_rl.api.options import ToolParserName
from openclaw_rl.cli.launchers.scripts import Runs
from openclaw_rl.config.options import ConfigError, flag
from openclaw_rl.learn.checkpoints import RECORD, Checkpoints

SERVER = Runs.SERVER
EPISODES = Runs.EPISODES
EVALUATION = Runs.EVALUATION
#: Where learning takes place.
LEARN = (SERVER, EPISODES)
#: Names of tool-call formats elsewhere, and ours.
TOOL_PARSERS: dict[str, str] = {
    **{name: name for name in get_args(ToolParserName)},
    **{"qwen": "hermes", "qwen25": "hermes", "gpt-oss": "harmony", "glm45": "glm"},
    **{"deepseekv3": "deepseek", "deepseekv31": "deepseek"},
}
THIS_MACHINE = ("127.0.0.1", "localhost", "::1")
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that stands for an option, or has a meaning of its own."""

    name: str
    option: str = ""
    """The option's name, if it stands for one."""
    scripts: tuple[Runs, ...] = LEARN
    meaning: str = ""
    """For the docs, if it stands for no option."""
    read: Callable[[str], str] = str
    """From its value to the option's. Raises ConfigError."""


def our_checkpoint(value: str) -> str:
    """REF_LOAD: only a checkpoint of this program can be loaded."""
    if not (Path(value).expanduser() / RECORD).is_file():
        raise ConfigError(
            "REF_LOAD is no checkpoint of this program (a Megatron one cannot be loaded here): give the Hugging Face "
            "folder as HF_CKPT."
        )
    return value


def published_checkpoint(value: str) -> str:
    """A checkpoint's folder; DIR/checkpoint-N and DIR/checkpoint-latest of the documents name those of the run DIR."""
    path = Path(value).expanduser()
    _, sign, which = path.name.partition("checkpoint-")
    if path.exists() or not sign or not (which == LATEST or which.isdigit()):
        return value
    saved = Checkpoints.of_run(path.parent, 1).all()
    fitting = [state for state in saved if which == LATEST or state.step == int(which)]
    if not fitting:
        steps = ", ".join(str(state.step) for state in saved) or "none"
        raise ConfigError(f"{value} is not there: the run {path.parent} has checkpoints of these steps: {steps}.")
    return str(fitting[-1].folder)


def tool_parser(value: str) -> str:
    if value not in TOOL_PARSERS:
        raise ConfigError(f"TOOL_CALL_PARSER {value} is not known here: use one of {', '.join(TOOL_PARSERS)}.")
    return TOOL_PARSERS[value]


VARIABLES = (
    Variable("HF_CKPT", "model_name", (*LEARN, EVALUATION)),
    Variable("MODEL_PATH", "model_name", (*LEARN, EVALUATION)),
    Variable("BASE_MODEL_PATH", "model_name", (*LEARN, EVALUATION)),
    Variable("PRM_MODEL_PATH", "teacher_model_name"),
    Variable("JUDGE_MODEL_PATH", "teacher_model_name"),
    Variable("PRM_TEACHER_HF", "teacher_model_name"),
    Variable("SAVE_CKPT", "run_dir"),
    Variable("CKPT_SAVE_DIR", "run_dir"),
    Variable("REF_LOAD", "resume_from_ckpt", read=our_checkpoint),
    Variable("RESUME_CKPT", "resume_from_ckpt", read=published_checkpoint),
    Variable("PRM_MAX_NEW_TOKENS", "prm_max_tokens"),
    Variable("OPENCLAW_EVAL_MODE", "eval_mode", (SERVER,)),
    Variable("HOST", "proxy_host", (SERVER,)),
    Variable("OPENCLAW_HOST", "proxy_host", (SERVER,)),
    Variable("PORT", "proxy_port", (SERVER,)),
    Variable("OPENCLAW_PORT", "proxy_port", (SERVER,)),
    Variable("CONTEXT_LENGTH", "max_context_tokens"),
    Variable("TOOL_CALL_PARSER", "tool_parser", read=tool_parser),
    Variable("MAX_TOKENS_PER_GPU", "micro_batch_tokens"),
    Variable("MAX_STEPS", "max_turns", (EPISODES,)),
    Variable("DATA_PATH", scripts=(SERVER,), meaning="a file or folder for `openclaw-rl train`, before serving"),
    Variable("TRAIN_ONLY", scripts=(SERVER,), meaning="1: train on DATA_PATH and do not serve"),
    Variable("CKPT_ARGS", meaning="flags"),
    Variable("ROLLOUT_ARGS", meaning="flags"),
    Variable("OPTIMIZER_ARGS", meaning="flags"),
    Variable("LORA_ARGS", meaning="flags; --use-lora trains an adapter"),
    Variable("MEM_FRACTION_STATIC", meaning="memory of the sampler: in --vllm-args or --sglang-args"),
    Variable("USE_WANDB", meaning="0: --wandb-project has no effect"),
    Variable("WANDB_KEY", meaning="the same as WANDB_API_KEY"),
    Variable("MASTER_ADDR", meaning="only this machine; another one is refused"),
    Variable("PRM_TEACHER_LOAD", meaning="refused: it names a Megatron checkpoint"),
)
#: Variables that environments read themselves.
READ_BY_ENVIRONMENTS = {
    "SCREENSHOT_BACKEND": ("run_gui_rl", "playwright; another one is refused"),
    "SWE_BENCH_PATH": ("run_swe_rl", "the folder of SWE-bench instances"),
}
#: Flags of the documents that have another name here.
FLAGS: Mapping[str, str] = {
    "--lr": "learning_rate",
    "--save-dir": "run_dir",
    "--resume-from-checkpoint": "resume_from_ckpt",
    "--rollout-batch-size": "batch_size",
    "--num-rollouts-per-prompt": "group_size",
}


def options_from(environment: Mapping[str, str], runs: Runs) -> dict[str, str]:
    """The options that the variables of a script set. Raises ConfigError."""
    if environment.get("PRM_TEACHER_LOAD"):
        raise ConfigError(
            "PRM_TEACHER_LOAD names a Megatron checkpoint, which cannot be loaded here: give the Hugging Face folder "
            "as PRM_TEACHER_HF."
        )
    if environment.get("MASTER_ADDR", THIS_MACHINE[0]) not in ("", *THIS_MACHINE):
        raise ConfigError(
            f"MASTER_ADDR {environment['MASTER_ADDR']} is another machine, and this script uses one: unset it."
        )
    options: dict[str, tuple[str, str]] = {}
    for variable in VARIABLES:
        text = environment.get(variable.name)
        if not text or not variable.option or runs not in variable.scripts:
            continue
        value = variable.read(text)
        earlier, same = options.get(variable.option, (variable.name, value))
        if same != value:
            raise ConfigError(
                f"{earlier} and {variable.name} differ, and both mean {flag(variable.option)}: give one of them."
            )
        options[variable.option] = variable.name, value
    return {name: value for name, (_variable, value) in options.items()}


def launchers_table() -> str:
    """All variables as Markdown tables, one for each kind of script, for the docs."""
    names: dict[str, dict[str, list[str]]] = {}
    for scripts, meaning, name in sorted(variables_in_words()):
        names.setdefault(scripts, {}).setdefault(meaning, []).append(f"`{name}`")
    tables = []
    for scripts, meanings in names.items():
        rows = [f"| {', '.join(variables)} | {meaning} |" for meaning, variables in meanings.items()]
        tables.append("\n".join([f"| variables of {scripts} | option or meaning |", "|---|---|", *rows]))
    flags = [f"| `{theirs}` | `{flag(ours)}` |" for theirs, ours in FLAGS.items()]
    flags.append("| `--use-lora` | `--lora-rank 32`, unless another rank is given |")
    return "\n\n".join([*tables, "\n".join(["| flag | ours |", "|---|---|", *flags])])


def variables_in_words() -> list[tuple[str, str, str]]:
    """Scripts, option or meaning, and name of each variable that docs/options.md does not name."""
    rows = []
    for variable in VARIABLES:
        meaning = f"`{flag(variable.option)}`" if variable.option else variable.meaning
        rows.append((scripts_in_words(variable.scripts), meaning, variable.name))
    rows.append((scripts_in_words((SERVER,)), "`--max-steps`", "MAX_STEPS"))
    for name, (script, meaning) in READ_BY_ENVIRONMENTS.items():
        rows.append((f"`{script}`", meaning, name))
    return rows


def scripts_in_words(runs: tuple[Runs, ...]) -> str:
    if set(runs) == set(Runs):
        return "all scripts"
    words = {SERVER: "servers", EPISODES: "environments", EVALUATION: "`run_eval`"}
    return " and ".join(words[kind] for kind in runs)
