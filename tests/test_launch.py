"""The launcher of the published top-k script: its variables mean here what they mean there, or are refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCHER = Path(__file__).parents[1] / "launch" / "run_qwen3_4b_openclaw_topk_select.sh"


def launch(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "COLUMNS": "200", **variables}
    return subprocess.run(["bash", LAUNCHER, "--dry-run", *flags], capture_output=True, text=True, env=environment)


def resolved(told: str) -> dict[str, str]:
    cells = ([cell.strip() for cell in line.split("│")] for line in told.splitlines() if line.startswith("│"))
    return {row[1]: row[2] for row in cells}


def test_it_resolves_to_what_is_documented() -> None:
    done = launch()
    assert done.returncode == 0, done.stderr
    values = resolved(done.stdout)
    assert values["--method"] == "topk-select"
    assert values["--model-name"] == "Qwen/Qwen3-4B-Instruct-2507"
    assert (values["--w-rl"], values["--w-opd"], values["--prm-m"]) == ("1.0", "1.0", "3")
    assert (values["--topk-k"], values["--topk-max-cand"], values["--topk-adv-diff-clip"]) == ("4", "3", "1.0")
    assert (values["--topk-hint-selection"], values["--topk-subset-mode"]) == ("sequence_optimal", "student")
    assert (values["--eps-clip"], values["--eps-clip-high"]) == ("0.2", "0.28")


def test_variables_are_mapped_and_flags_come_last() -> None:
    done = launch(
        "--topk-k",
        "2",
        HF_CKPT="my/policy",
        PRM_TEACHER_HF="my/teacher",
        PRM_MODEL_PATH="my/teacher",
        SAVE_CKPT="runs/mine",
        OPENCLAW_TOPK_K="8",
        OPENCLAW_TOPK_W_RL="0",
        OPENCLAW_TOPK_SUBSET_MODE="overlap",
        OPENCLAW_TOPK_HINT_SELECTION="token_optimal",
        OPENCLAW_RECORD_ENABLED="1",
        NUM_GPUS="8",
    )
    assert done.returncode == 0, done.stderr
    values = resolved(done.stdout)
    assert (values["--model-name"], values["--teacher-model-name"]) == ("my/policy", "my/teacher")
    assert values["--run-dir"] == "runs/mine"
    assert (values["--topk-k"], values["--w-rl"], values["--record"]) == ("2", "0.0", "True")
    assert (values["--topk-subset-mode"], values["--topk-hint-selection"]) == ("overlap", "token_optimal")
    assert "NUM_GPUS has no effect" in done.stderr


def test_a_checkpoint_of_this_program_is_begun_from(tmp_path: Path) -> None:
    (tmp_path / "checkpoint.json").write_text("{}")
    done = launch(REF_LOAD=str(tmp_path))
    assert f"--resume-from-ckpt: The checkpoint {tmp_path} is damaged" in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"PRM_TEACHER_LOAD": "x"}, "PRM_TEACHER_LOAD names a Megatron checkpoint"),
        ({"REF_LOAD": "/nowhere"}, "REF_LOAD is no checkpoint of this program"),
        ({"PRM_MODEL_PATH": "a", "PRM_TEACHER_HF": "b"}, "PRM_MODEL_PATH and PRM_TEACHER_HF differ"),
        ({"OPENCLAW_TOPK_W_RL": "0", "OPENCLAW_TOPK_W_OPD": "0"}, "--w-opd and --w-rl are both 0"),
        ({"PYTHON": "/nowhere/python"}, "Not installed yet: run 'make install'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(variables: dict[str, str], sentence: str) -> None:
    done = launch(**variables)
    assert done.returncode == 2
    assert sentence in " ".join(done.stderr.split())
