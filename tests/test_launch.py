"""The launchers of the published scripts: their variables mean here what they mean there, or are refused."""

import inspect
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from openclaw_rl.app.config import FIELDS
from openclaw_rl.cli import build_parser, main
from openclaw_rl.cli.launchers.build import build
from openclaw_rl.cli.launchers.scripts import SCRIPTS, Runs
from openclaw_rl.cli.launchers.variables import VARIABLES
from openclaw_rl.config.options import ConfigError, option_of
from openclaw_rl.envs.options import FIELDS as DRIVER_FIELDS

FOLDER = Path(__file__).parents[1] / "launch"
TOPK, SEVEN_B, TERMINAL = "run_qwen3_4b_openclaw_topk_select", "run_qwen3_7b_openclaw_rl", "run_terminal_rl"
CAPTION = "openclaw-rl "
#: The variables of the published scripts that options of ours name themselves.
READ_BY_OPTIONS = (
    *("PRM_M", "MAJORITY_VOTE_N", "MAJORITY_VOTE_THRESHOLD", "PRM_TEMPERATURE", "SGLANG_API_KEY", "SERVED_MODEL_NAME"),
    *("OPENCLAW_COMBINE_W_OPD", "OPENCLAW_COMBINE_W_RL", "OPENCLAW_TOPK_W_OPD", "OPENCLAW_TOPK_W_RL"),
    *("OPENCLAW_TOPK_K", "OPENCLAW_TOPK_MAX_CAND", "OPENCLAW_TOPK_HINT_SELECTION", "OPENCLAW_TOPK_SUBSET_MODE"),
    *(
        "OPENCLAW_TOPK_ADV_DIFF_CLIP",
        "OPENCLAW_RECORD_ENABLED",
        "WANDB_PROJECT",
        "NUM_GPUS",
        "ACTOR_GPUS",
        "TRAIN_GPUS",
    ),
    *("ROLLOUT_GPUS", "PRM_GPUS", "PRM_TEACHER_GPUS", "TP", "PRM_TP", "ENV_TYPE", "PARALLEL_ENVS", "TOOLS_CONFIG"),
)


@pytest.fixture(autouse=True)
def bare_environment() -> Iterator[None]:
    """Only what programs need; a script also changes the environment of its commands."""
    before = dict(os.environ)
    for name in set(os.environ) - {"PATH", "HOME", "PYTHONPATH", "OMP_NUM_THREADS"}:
        del os.environ[name]
    os.environ["COLUMNS"] = "200"
    yield
    os.environ.clear()
    os.environ.update(before)


def commands(script: str, *flags: str, **variables: str) -> list[list[str]]:
    return build(SCRIPTS[script], flags, variables).commands


def options(command: list[str]) -> dict[str, str]:
    """Flags of a command with their values; one that is there twice has its last value."""
    return dict(zip(command, [*command[1:], ""], strict=True))


def launch(script: str, *flags: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a script as a user does, to see what it would run."""
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    call = ["bash", str(FOLDER / f"{script}.sh"), "--dry-run", *flags]
    return subprocess.run(call, capture_output=True, text=True, env=environment)


def resolved(shown: str) -> dict[str, str]:
    cells = ([cell.strip() for cell in line.split("│")] for line in shown.splitlines() if line.startswith("│"))
    return {row[1]: row[2] for row in cells}


def test_there_is_a_file_for_every_script_and_none_ends_processes() -> None:
    files = {path.stem for path in FOLDER.glob("run_*.sh")}
    assert files >= {*SCRIPTS, "run_ray"}
    assert len(SCRIPTS) == 10 + 6 + 3 + 4 + 1
    for path in FOLDER.glob("*.sh"):
        assert os.access(path, os.X_OK)
        assert "kill" not in path.read_text()


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_has_a_dry_run(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    os.environ["MODEL_PATH"] = "my/model"
    code = main(["launch", script, "--dry-run"])
    said = capsys.readouterr()
    if script == "run_gui_rl" and find_spec("playwright") is None:
        assert (code, "openclaw-rl[browser]" in said.err) == (2, True), "it names the package that is missing"
        return
    assert code == 0
    assert said.err.startswith(f"{CAPTION}{SCRIPTS[script].runs}")
    assert "my/model" in said.err
    if SCRIPTS[script].runs is Runs.SERVER:
        shown = resolved(said.out)
        assert shown["--model-name"] == "my/model"
        assert (shown["--lora-rank"] == "32") == ("lora" in script)


def test_the_script_of_the_documents_resolves_to_what_they_say() -> None:
    done = launch(TOPK)
    assert done.returncode == 0, done.stderr
    values = resolved(done.stdout)
    assert values["--method"] == "topk-select"
    assert values["--model-name"] == "Qwen/Qwen3-4B-Instruct-2507"
    assert (values["--w-rl"], values["--w-opd"], values["--prm-m"]) == ("1.0", "1.0", "3")
    assert (values["--topk-k"], values["--topk-max-cand"], values["--topk-adv-diff-clip"]) == ("4", "3", "1.0")
    assert (values["--topk-hint-selection"], values["--topk-subset-mode"]) == ("sequence_optimal", "student")
    assert (values["--eps-clip"], values["--eps-clip-high"]) == ("0.2", "0.28")


def test_episodes_and_evaluations_are_launched_for_real_too() -> None:
    done = launch(TERMINAL, "--tasks", "3", ENV_TYPE="terminal", MAX_STEPS="20", PARALLEL_ENVS="32", BATCH_SIZE="5")
    assert done.returncode == 0, done.stderr
    values = resolved(done.stdout)
    assert (values["--env"], values["--tasks"], values["--max-turns"], values["--parallel"]) == (
        "terminal",
        "3",
        "20",
        "32",
    )
    # The options of the server that it starts are shown too.
    assert (values["--batch-size"], values["--judge"]) == ("5", "feedback")
    assert done.stderr == "openclaw-rl rollout --own-server --env terminal --max-turns 20 --tasks 3 -- --batch-size 5\n"
    done = launch("run_eval", "--eval-tasks", "coding")
    assert (done.returncode, done.stderr) == (0, "openclaw-rl eval --eval-tasks coding\n")


def test_what_is_not_installed_is_said() -> None:
    done = launch(TOPK, PYTHON="/nowhere/python")
    assert (done.returncode, "Not installed yet: run 'make install'" in done.stderr) == (2, True)


@pytest.mark.parametrize(
    ("variables", "flag", "value"),
    [
        ({"HF_CKPT": "my/policy"}, "--model-name", "my/policy"),
        ({"MODEL_PATH": "my/policy", "HF_CKPT": "my/policy"}, "--model-name", "my/policy"),
        ({"PRM_TEACHER_HF": "my/teacher", "PRM_MODEL_PATH": "my/teacher"}, "--teacher-model-name", "my/teacher"),
        ({"JUDGE_MODEL_PATH": "my/judge"}, "--teacher-model-name", "my/judge"),
        ({"SAVE_CKPT": "runs/mine"}, "--run-dir", "runs/mine"),
        ({"CKPT_SAVE_DIR": "runs/mine"}, "--run-dir", "runs/mine"),
        ({"PRM_MAX_NEW_TOKENS": "99"}, "--prm-max-tokens", "99"),
        ({"OPENCLAW_PORT": "8000"}, "--proxy-port", "8000"),
        ({"HOST": "127.0.0.1"}, "--proxy-host", "127.0.0.1"),
        ({"CONTEXT_LENGTH": "4096"}, "--max-context-tokens", "4096"),
        ({"TOOL_CALL_PARSER": "qwen25"}, "--tool-parser", "hermes"),
        ({"MAX_TOKENS_PER_GPU": "8192"}, "--micro-batch-tokens", "8192"),
        ({"CKPT_ARGS": "--save-interval 50 --save-dir here"}, "--save-interval", "50"),
        ({"CKPT_ARGS": "--save-interval 50 --save-dir here"}, "--run-dir", "here"),
        ({"OPTIMIZER_ARGS": "--lr 1e-6 --weight-decay 0.01"}, "--learning-rate", "1e-6"),
        ({"ROLLOUT_ARGS": "--rollout-batch-size 32 --num-rollouts-per-prompt 4"}, "--batch-size", "32"),
        ({"ROLLOUT_ARGS": "--rollout-batch-size 32 --num-rollouts-per-prompt 4"}, "--group-size", "4"),
        ({"LORA_ARGS": "--use-lora --lora-rank 64 --lora-alpha 128"}, "--lora-rank", "64"),
        ({"LORA_ARGS": "--use-lora"}, "--lora-rank", "32"),
        ({}, "--lora-rank", "0"),
    ],
)
def test_a_variable_sets_its_option(variables: dict[str, str], flag: str, value: str) -> None:
    (command,) = commands(TOPK, **variables)
    assert options(command)[flag] == value
    build_parser().parse_args(command)


def test_flags_win_over_variables_and_those_over_the_script() -> None:
    (command,) = commands(
        TOPK, "--run-dir", "flag", "--backend", "vllm", SAVE_CKPT="variable", MEM_FRACTION_STATIC="0.7"
    )
    shown = options(command)
    assert (shown["--run-dir"], shown["--backend"]) == ("flag", "vllm")
    assert shown["--vllm-args=--gpu-memory-utilization 0.7"] == ""
    # The program reads these itself, so the script must not set them.
    (command,) = commands(TOPK, LORA_RANK="8", RUN_DIR="mine")
    assert not {"--lora-rank", "--run-dir"} & set(command)


def test_other_variables_of_the_published_scripts_are_named_by_options() -> None:
    named = {variable for field in (*FIELDS.values(), *DRIVER_FIELDS.values()) for variable in option_of(field).env}
    assert set(READ_BY_OPTIONS) <= named
    assert len({variable.name for variable in VARIABLES} & set(READ_BY_OPTIONS)) == 0


def test_trajectories_are_trained_on_before_serving_or_instead_of_it(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "notes.txt"):
        (tmp_path / name).write_text("")
    train, serve = commands(SEVEN_B, "--proxy-port", "31000", MODEL_PATH="m", DATA_PATH=str(tmp_path))
    assert train[:3] == ["train", str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]
    assert (options(train)["--method"], "--proxy-port" in train) == ("rl", False)
    assert (serve[0], options(serve)["--proxy-port"], options(serve)["--run-dir"]) == (
        "serve",
        "31000",
        options(train)["--run-dir"],
    )
    file = str(tmp_path / "a.jsonl")
    assert [one[:2] for one in commands(SEVEN_B, MODEL_PATH="m", DATA_PATH=file, TRAIN_ONLY="1")] == [["train", file]]


def test_the_last_command_replaces_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text("")
    replaced: list[list[str]] = []

    def replace(program: str, words: list[str]) -> None:
        replaced.append(words)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", replace)
    # The parser that tests share was built before, with the command itself.
    monkeypatch.setattr("openclaw_rl.cli.build_parser", inspect.unwrap(build_parser))
    monkeypatch.setattr("openclaw_rl.cli.train.run", lambda options: 1)
    os.environ.update(MODEL_PATH="m", DATA_PATH=str(tmp_path), WANDB_KEY="w", WANDB_PROJECT="p", USE_WANDB="0")
    with pytest.raises(SystemExit):
        main(["launch", SEVEN_B])
    assert [words[:4] for words in replaced] == [[sys.executable, "-m", "openclaw_rl", "serve"]]
    assert (os.environ["WANDB_API_KEY"], os.environ.get("WANDB_PROJECT")) == ("w", None)


def test_a_server_for_episodes_gets_its_options_as_flags() -> None:
    flags = ("--use-lora", "--lora-rank", "4", "--num-rollouts-per-prompt", "6")
    (command,) = commands(TERMINAL, *flags, MODEL_PATH="m", TRAIN_GPUS="1", MAX_STEPS="20", LEARNING_RATE="1e-5")
    split = command.index("--")
    shown, server = options(command[:split]), options(command[split + 1 :])
    assert (shown["--env"], shown["--group"], shown["--max-turns"], shown["--model-name"]) == (
        "terminal",
        "6",
        "20",
        "m",
    )
    assert (server["--train-gpus"], server["--learning-rate"], server["--lora-rank"]) == ("1", "1e-5", "4")
    assert "--max-steps" not in server


def test_checkpoints_have_the_names_of_the_documents(tmp_path: Path) -> None:
    for step in (20, 40):
        folder = tmp_path / "checkpoints" / f"step-{step:06d}-v{step}"
        folder.mkdir(parents=True)
        record = f'{{"step": {step}, "version": {step}, "created": 0, "batches": [], "files": {{}}}}'
        (folder / "checkpoint.json").write_text(record)
    (command,) = commands(TOPK, RESUME_CKPT=str(tmp_path / "checkpoint-20"))
    assert options(command)["--resume-from-ckpt"].endswith("step-000020-v20")
    (command,) = commands(TOPK, "--resume-from-checkpoint", str(tmp_path / "checkpoint-latest"))
    assert options(command)["--resume-from-ckpt"].endswith("step-000040-v40")
    (command,) = commands("run_eval", "--model-path", str(tmp_path / "checkpoint-latest"))
    assert command[-1].endswith("step-000040-v40")
    (command,) = commands(TOPK, REF_LOAD=str(folder))
    assert options(command)["--resume-from-ckpt"] == str(folder)
    with pytest.raises(ConfigError, match="has checkpoints of these steps: 20, 40"):
        commands(TOPK, RESUME_CKPT=str(tmp_path / "checkpoint-30"))


def test_a_server_is_submitted_to_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.update(MODEL_PATH="my/model", PRM_M="5", SGLANG_API_KEY="S3CRET")
    assert main(["launch", "run_ray", "run_qwen3_4b_openclaw_rl_lora", "--dry-run"]) == 0
    submitted = capsys.readouterr().err
    words = shlex.split(submitted.splitlines()[0])
    assert words[:4] == ["ray", "job", "submit", "--runtime-env-json"]
    assert json.loads(words[4]) == {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120", "PRM_M": "5"}}
    assert words[5:8] == ["--", "openclaw-rl", "serve"]
    assert words[-2:] == ["--launcher", "ray"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["launch", "run_ray", "run_qwen3_4b_openclaw_rl_lora"]) == 2
    assert "There is no program ray" in capsys.readouterr().err
    os.environ["DATA_PATH"] = __file__
    assert main(["launch", "run_ray", "run_qwen3_4b_openclaw_rl_lora", "--dry-run"]) == 2
    assert "run_ray.sh submits one command: with DATA_PATH" in capsys.readouterr().err


def test_keys_are_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", TOPK, "--api-key", "alice=S3CRET", "--admin-key=T0P", "--dry-run"]) == 0
    said = capsys.readouterr()
    assert "S3CRET" not in said.err + said.out
    assert "T0P" not in said.err + said.out


@pytest.mark.parametrize(
    ("script", "flags", "variables", "sentence"),
    [
        (TOPK, (), {"PRM_TEACHER_LOAD": "x"}, "PRM_TEACHER_LOAD names a Megatron checkpoint"),
        (TOPK, (), {"REF_LOAD": "/nowhere"}, "REF_LOAD is no checkpoint of this program"),
        (TOPK, (), {"PRM_MODEL_PATH": "a", "PRM_TEACHER_HF": "b"}, "PRM_MODEL_PATH and PRM_TEACHER_HF differ"),
        (TOPK, (), {"OPENCLAW_PORT": "1", "PORT": "2"}, "PORT and OPENCLAW_PORT differ, and both mean --proxy-port"),
        (TOPK, (), {"OPENCLAW_TOPK_W_RL": "0", "OPENCLAW_TOPK_W_OPD": "0"}, "--w-opd and --w-rl are both 0"),
        (TOPK, (), {"MASTER_ADDR": "10.0.0.1"}, "MASTER_ADDR 10.0.0.1 is another machine"),
        (TOPK, (), {"TOOL_CALL_PARSER": "x"}, "TOOL_CALL_PARSER x is not known here"),
        (TOPK, (), {"MEM_FRACTION_STATIC": "0.5"}, "MEM_FRACTION_STATIC is for --sampler vllm or sglang"),
        (TOPK, (), {"LORA_ARGS": "--lora-rank '6"}, "LORA_ARGS cannot be read"),
        (TOPK, (), {"CKPT_ARGS": "--save-everything"}, "There is no option --save-everything"),
        (TOPK, (), {"TRAIN_ONLY": "1"}, "TRAIN_ONLY needs DATA_PATH"),
        (TOPK, (), {"DATA_PATH": "/nowhere"}, "DATA_PATH: there is no file /nowhere"),
        (TOPK, (), {"ACTOR_GPUS": "4", "NUM_GPUS": "2"}, "--train-gpus 4 are 4 GPUs, and there are 2"),
        (TOPK, ("--bacth-size", "1"), {}, "did you mean --batch-size?"),
        (SEVEN_B, (), {}, "MODEL_PATH is not set"),
        (TERMINAL, (), {"ENV_TYPE": "swe"}, "use run_swe_rl.sh, or unset it"),
        ("run_toolcall_rl", (), {"TOOLS_CONFIG": "/nowhere.json"}, "there is no file /nowhere.json"),
        ("run_swe_rl", (), {"SWE_BENCH_PATH": "/nowhere"}, "/nowhere"),
        ("run_gui_rl", (), {"SCREENSHOT_BACKEND": "selenium"}, "SCREENSHOT_BACKEND=selenium is not supported"),
        (TERMINAL, ("--model-name", "/nowhere/model"), {}, "/nowhere/model"),
        ("run_ray", (), {}, "run_ray.sh needs the name of the server to run as its first argument"),
        ("run_nothing", (), {}, "There is no script run_nothing: use one of run_qwen3_4b"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    script: str, flags: tuple[str, ...], variables: dict[str, str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    os.environ.update(variables)
    assert main(["launch", script, "--dry-run", *flags]) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
