"""The split of GPUs as `serve --dry-run` shows it, and the splits that it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.app.config import Config, load
from openclaw_rl.app.console import banner
from openclaw_rl.app.doctor import CHECKS
from openclaw_rl.app.larger_model import in_words, larger_model
from openclaw_rl.app.split import check_seen, check_split, parts_of
from openclaw_rl.cli import main
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.factory import sampler_factory
from openclaw_rl.engines.gpus import Visible
from openclaw_rl.engines.memory import known_models

GIB = 1 << 30
EIGHT = Visible((80 * GIB,) * 8)
SIZES = {**known_models()["Qwen/Qwen3-4B"], "max_position_embeddings": 262144}
CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **SIZES}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing of Qwen3-4B but its sizes."""
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def config_of(model: Path, **given: Any) -> Config:
    return load({"model_name": str(model), **given}, {}).config


def table(config: Config) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(part.role, part.process, part.devices) for part in parts_of(config, EIGHT)]


def test_the_published_split_runs_on_one_machine_of_eight_gpus(qwen: Path) -> None:
    config = config_of(
        qwen, sampler="vllm", train_gpus="1", rollout_gpus="4", rollout_tp=2, judge_gpus="1", teacher_gpus="1"
    )
    check_split(config, EIGHT)
    assert table(config) == [
        ("policy", "vllm server 1", (1, 2)),
        ("policy", "vllm server 2", (3, 4)),
        ("learner", "local learner", (0,)),
        ("judge and teacher", "vllm server", (5, 6)),
    ]


def test_the_servers_of_a_split_are_started_on_its_gpus(qwen: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = config_of(qwen, sampler="sglang", train_gpus="1", rollout_gpus="2", rollout_tp=1, judge_gpus="1")
    factory = sampler_factory("sglang")
    commands = factory.start_commands(config.engine_settings)
    assert ["CUDA_VISIBLE_DEVICES=1" in commands[0], "CUDA_VISIBLE_DEVICES=2" in commands[1]] == [True, True]
    assert all(command[command.index("--tp-size") + 1] == "1" for command in commands)
    (judge,) = factory.start_commands(config.engine_settings.for_teacher())
    assert "CUDA_VISIBLE_DEVICES=3" in judge


def test_a_local_sampler_and_the_learner_share_one_gpu_and_its_weights(qwen: Path) -> None:
    policy, learner = parts_of(config_of(qwen, judge="feedback", method="rl", train_gpus="3,"), EIGHT)
    assert (policy.devices, learner.devices) == ((3,), (3,))
    assert policy.memory is not None
    assert learner.memory is not None
    assert (policy.memory.weights > 7 * GIB, learner.memory.weights) == (True, 0)
    policy, learner = parts_of(config_of(qwen, judge="feedback", method="rl", train_gpus="1", rollout_gpus="1"), EIGHT)
    assert (policy.devices, learner.devices) == ((1,), (0,))
    assert learner.memory is not None
    assert learner.memory.weights == policy.memory.weights if policy.memory else False


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            {"train_gpus": "0,", "lora_rank": 0, "gpu_memory": 80},
            r"GPU 0 needs 89.9 GiB \(policy: weights 22.5; learner: weights 22.5 \+ gradients 15.0 \+ optimiser 30.0\)"
            ", and has 80.0 GiB",
        ),
        (
            {"sampler": "vllm", "rollout_gpus": "1", "train_gpus": "1", "gpu_memory": 24},
            r"GPU 1 needs 44.0 GiB \(policy: weights 7.5 \+ adapter 0.5 \+ KV cache 36.0\), and has 24.0 GiB",
        ),
        ({"rollout_gpus": "2"}, "these are 2 GPUs, and a local sampler uses one"),
        ({"judge_gpus": "2"}, "these are 2 GPUs, and a local sampler uses one"),
        ({"train_gpus": "1", "max_steps": 0}, "--train-gpus 1: nothing is trained"),
        ({"judge_gpus": "1", "method": "rl", "judge": "feedback"}, "no model on an engine judges or teaches"),
        (
            {"rollout_gpus": "1", "sampler": "vllm", "vllm_url": "http://h:1"},
            "--vllm-url names servers that run already",
        ),
        ({"train_gpus": "1", "backend": "tinker"}, "the learner tinker has no GPU of this machine"),
    ],
)
def test_a_split_that_cannot_be_is_refused_with_the_reason(qwen: Path, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_split(config_of(qwen, **given), EIGHT)


A_SAMPLER = """
from openclaw_rl.engines.local.factory import LocalSamplerFactory
from openclaw_rl.engines.memory import EngineProcess, Memory

class Mine(LocalSamplerFactory):
    name = "mine"

    def why_no_gpus(self, settings):
        return ""

    def processes(self, settings, size):
        return [EngineProcess("my server", settings.split.sampling, Memory(weights=size.parameters))]

SAMPLER = Mine()
NOTHING = object()
"""


def test_a_sampler_from_a_file_can_be_given_gpus(qwen: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(A_SAMPLER)
    config = config_of(qwen, sampler=str(file), train_gpus="1", rollout_gpus="2", method="rl", judge="feedback")
    check_split(config, EIGHT)
    assert table(config) == [("policy", "my server", (1, 2)), ("learner", "local learner", (0,))]
    with pytest.raises(ConfigError, match=r"GPU 1 needs 3.7 GiB \(policy: weights 3.7\), and has 3.0 GiB"):
        check_split(config, Visible((80 * GIB, 3 * GIB, 3 * GIB)))
    with pytest.raises(ConfigError, match="is no sampler"):
        check_split(config_of(qwen, sampler=f"{file}:NOTHING"), EIGHT)


def test_a_model_that_is_not_here_yet_is_shown_without_sizes() -> None:
    config = load({"model_name": "nobody/knows-this", "train_gpus": "1", "gpu_memory": 1}, {}).config
    check_split(config, Visible(None))
    assert {part.memory for part in parts_of(config, Visible(None))} == {None}


def test_the_dry_run_prints_the_table_also_without_a_gpu(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model-name", str(tiny_model), "--train-gpus", "1", "--gpu-memory", "80", "--run-dir", str(tmp_path))
    assert main(["serve", "--dry-run", "--no-environment", *flags]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if "local learner" in line]
    assert [cell.strip() for cell in rows[0][1:4]] == ["learner", "local learner", "0"]
    assert main(["serve", "--dry-run", "--no-environment", *flags[:-4], "--gpu-memory", "0.0001"]) == 2
    assert "GPU 0 needs" in capsys.readouterr().err


def test_chosen_gpus_on_a_machine_without_any_are_refused_at_the_start(
    qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("openclaw_rl.app.split.visible_gpus", lambda: Visible(None))
    with pytest.raises(ConfigError, match="--train-gpus 1: this machine has no GPU"):
        check_seen(config_of(qwen, train_gpus="1"))


@pytest.mark.parametrize(
    ("gpu", "free", "fits"),
    [
        (None, 4, None),
        (None, 12, "Qwen/Qwen3-0.6B"),
        # More would fit, and be too slow.
        (None, 500, "Qwen/Qwen3-1.7B"),
        (8, 500, "Qwen/Qwen3-0.6B"),
        (24, 500, "Qwen/Qwen3-4B"),
        (48, 500, "Qwen/Qwen3-8B"),
        (2, 500, None),
    ],
)
def test_who_runs_the_embedded_model_is_told_which_larger_one_would_fit(
    gpu: int | None, free: int, fits: str | None, tmp_path: Path
) -> None:
    visible = Visible(None if gpu is None else (gpu * GIB,))
    config = load({"cache_dir": str(tmp_path)}, {}).config
    fit = larger_model(config, visible, free * GIB)
    assert (fit.name if fit else None) == fits
    chosen = load({"cache_dir": str(tmp_path), "model_name": "Qwen/Qwen3-0.6B"}, {}).config
    assert larger_model(chosen, visible, free * GIB) is None
    if fit is None:
        return
    command = in_words(config, fit).partition(": openclaw-rl ")[2].split()
    # The command is accepted, and needs what was said. What is not downloaded yet is known too.
    suggested = load({"model_name": fit.name, "max_context_tokens": 8192, "dtype": "auto" if gpu else "float32"}, {})
    needed = sum(part.memory.total for part in parts_of(suggested.config, visible) if part.memory)
    assert needed == fit.needed
    assert command[:3] == ["serve", "--model-name", fit.name]
    assert command[-1] == f"runs/{fit.name.partition('/')[2].lower()}"


def test_the_first_lines_of_a_server_and_doctor_name_the_larger_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = load({"device": "cpu", "preset": "personal"}, {}).config
    command = "openclaw-rl serve --model-name Qwen/Qwen3-1.7B --max-context-tokens 8192 --preset personal"
    monkeypatch.setattr("openclaw_rl.app.larger_model.usable_memory", lambda: 64 * GIB)
    banner(config, "local", 0, 30000)
    assert command in capsys.readouterr().err
    assert command in CHECKS["larger"](config).text
    monkeypatch.setattr("openclaw_rl.app.larger_model.usable_memory", lambda: GIB)
    banner(config, "local", 0, 30000)
    assert "Qwen" not in capsys.readouterr().err
    assert CHECKS["larger"](config).text == "none of those that are known would fit"
