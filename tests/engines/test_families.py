"""Only the local engine refuses a model for its family: other engines may run it."""

import json
import shutil
from pathlib import Path

import pytest

from openclaw_rl.cli import main
from openclaw_rl.engines.local.families import runnable
from openclaw_rl.models import ModelNotFound, fetch_model, fetch_tokenizer, find_model
from support.tiny_models import save_tiny_gemma, save_tiny_mixture


def changed(model: Path, folder: Path, **changes: object) -> Path:
    """A copy of a model whose configuration says something else."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["Gemma3ForCausalLM"]}, r"holds a Gemma3ForCausalLM.* no language model of this name and"),
        (
            {"architectures": ["MyModel"], "model_type": "mine"},
            r"holds a MyModel.* Transformers \d.* no language model",
        ),
        (
            {"architectures": ["MyModel"], "model_type": "mine", "auto_map": {"AutoModelForCausalLM": "mine.MyModel"}},
            r"which only its own code mine.MyModel knows: it would run .* allow it with --trust-remote-code",
        ),
        ({"architectures": None}, "holds a model without a named family"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "quantised weights, by hqq, which is not read here",
        ),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "in a form of gptq that is not read here"),
    ],
)
def test_a_model_that_the_local_engine_cannot_run_is_found_for_others(
    tiny_model: Path, tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    folder = changed(tiny_model, tmp_path / "model", **changes)
    with pytest.raises(ModelNotFound, match=reason):
        runnable(folder)
    name = str(folder)
    assert find_model(name, tmp_path) == fetch_model(name, tmp_path) == fetch_tokenizer(name, tmp_path) == folder


def test_dry_run_says_what_a_family_can_do_and_refuses_what_it_cannot(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_gemma(tiny_model, tmp_path / "gemma")
    flags = ["serve", "--dry-run", "--no-environment", "--model-name", str(model), "--run-dir", str(tmp_path / "run")]
    assert main(flags) == 0
    shown = capsys.readouterr().out
    assert "Gemma2ForCausalLM is computed by the code of Transformers" in shown
    assert "It has prefix cache, packed training" in shown
    assert "not --lora-rank 0" in shown
    for option in (["--lora-rank", "0"], ["--learner-ranks", "2", "--shard-weights"]):
        assert main([*flags, *option]) == 2
        assert "needs a model of our own decoder" in capsys.readouterr().err


def test_experts_are_adapted_where_that_can_be_kept(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_tiny_mixture(tiny_model, tmp_path / "mixture")
    flags = ["serve", "--dry-run", "--no-environment", "--run-dir", str(tmp_path / "run"), "--lora-experts"]
    assert main([*flags, "--model-name", str(model)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "with --lora-experts on the experts too, without CUDA graphs" in shown
    for option, sentence in (
        (["--model-name", str(tiny_model)], "needs a model with experts that PEFT can adapt"),
        (["--sampler", "vllm", "--vllm-url", "http://127.0.0.1:9"], "vllm is not given adapters on experts"),
        (["--lora-rank", "0"], "--lora-rank 0 trains all weights"),
        (["--lora-dropout", "0.1"], "PEFT has no dropout on experts"),
    ):
        assert main([*flags, "--model-name", str(model), *option]) == 2
        assert sentence in " ".join(capsys.readouterr().err.split())


def test_a_folder_that_is_no_model_is_refused_for_every_engine(tiny_model: Path, tmp_path: Path) -> None:
    folder = changed(tiny_model, tmp_path / "model")
    assert runnable(folder) == folder
    for text in ("{", "[]"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelNotFound, match="cannot be read"):
            find_model(str(folder), tmp_path)
    (folder / "config.json").unlink()
    with pytest.raises(ModelNotFound, match=r"it has no config\.json"):
        find_model(str(folder), tmp_path)
