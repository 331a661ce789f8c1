"""A merged model says what the base model says with its adapter, to programs that know nothing of adapters."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from openclaw_rl.cli import main
from openclaw_rl.engines.local.merge import merge_adapter
from openclaw_rl.errors import UserError

IDS = torch.arange(40).reshape(2, 20)


def logits(folder: Path, adapter: Path | None = None) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        model = PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        found: torch.Tensor = model.eval()(IDS).logits
    return found


def test_a_merged_model_computes_what_base_and_adapter_compute(
    tiny_model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    merge_adapter(tiny_model, adapters[0], tmp_path / "merged")
    merged = logits(tmp_path / "merged")
    assert torch.allclose(merged, logits(tiny_model, adapters[0]), atol=1e-4)
    assert (merged - logits(tiny_model)).abs().max() > 0.1
    text = "hello world"
    one, other = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_model, tmp_path / "merged"))
    assert one(text).input_ids == other(text).input_ids
    assert one.chat_template == other.chat_template


def test_a_model_in_several_files_stays_in_several_files(
    tiny_model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model).save_pretrained(tmp_path / "base", max_shard_size="100KB")
    shards = sorted(path.name for path in (tmp_path / "base").glob("*.safetensors"))
    assert len(shards) > 1
    seen = []
    merge_adapter(tmp_path / "base", adapters[1], tmp_path / "merged", lambda parts: map(seen.append, parts) and parts)
    assert sorted(path.name for path in (tmp_path / "merged").glob("*.safetensors")) == shards
    assert torch.allclose(logits(tmp_path / "merged"), logits(tiny_model, adapters[1]), atol=1e-4)


def test_rank_stabilised_scaling_is_heeded(tiny_model: Path, adapters: list[Path], tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for path in adapters[0].iterdir():
        (adapter / path.name).write_bytes(path.read_bytes())
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, "use_rslora": True}))
    merge_adapter(tiny_model, adapter, tmp_path / "merged")
    assert torch.allclose(logits(tmp_path / "merged"), logits(tiny_model, adapter), atol=1e-4)


def test_weights_of_half_precision_stay_so(tiny_model: Path, adapters: list[Path], tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny_model).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    merge_adapter(tmp_path / "base", adapters[0], tmp_path / "merged")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype="auto")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_folder_that_is_not_empty_is_left_alone(tiny_model: Path, adapters: list[Path], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(UserError, match="not empty"):
        merge_adapter(tiny_model, adapters[0], tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
    with pytest.raises(UserError):
        merge_adapter(tiny_model, adapters[0], tmp_path / "mine.txt")


def test_what_is_no_adapter_of_this_model_is_refused_in_a_sentence_and_leaves_nothing(
    tiny_model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(UserError):
        merge_adapter(tiny_model, tmp_path / "nowhere", tmp_path / "one")
    config = LlamaConfig.from_pretrained(tiny_model)
    config.num_hidden_layers = 1
    LlamaForCausalLM(config).save_pretrained(tmp_path / "shallow")
    with pytest.raises(UserError, match=r"layers\.1"):
        merge_adapter(tmp_path / "shallow", adapters[0], tmp_path / "two")
    config.num_hidden_layers, config.intermediate_size = 2, 48
    LlamaForCausalLM(config).save_pretrained(tmp_path / "narrow")
    with pytest.raises(UserError):
        merge_adapter(tmp_path / "narrow", adapters[0], tmp_path / "three")
    assert not any((tmp_path / name).exists() for name in ("one", "two", "three"))


def test_the_command_says_where_the_model_is(
    tiny_model: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merged"
    assert main(["merge", str(adapters[0]), str(out), "--model-name", str(tiny_model)]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == (f"The merged model is in {out}\n", "")
    assert (out / "config.json").is_file()
    assert main(["merge", str(adapters[0]), str(out), "--model-name", str(tiny_model)]) == 2
    assert "not empty" in capsys.readouterr().err


def test_quantised_weights_are_refused_by_the_command(
    tiny_model: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
    out = tmp_path / "merged"
    run_dir = ["--run-dir", str(tmp_path / "run")]
    assert main(["merge", str(adapters[0]), str(out), "--model-name", str(model), *run_dir]) == 2
    assert "holds quantised weights" in capsys.readouterr().err
    assert not out.exists()
