"""A merged model says what the base model says with its adapter, to programs that know nothing of adapters.

`make test-gguf` compares what llama.cpp computes from the files with our engine.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from openclaw_rl.cli import main
from openclaw_rl.engines.local.gguf_export import GgufExport
from openclaw_rl.engines.local.merge import UNFINISHED, fitting_adapter, merge_adapter
from openclaw_rl.engines.local.model.policy_slots import read_adapter
from openclaw_rl.errors import UserError
from openclaw_rl.learn.checkpoints import line_folder, verify, write_new_record
from openclaw_rl.ledger import notes
from openclaw_rl.ledger.schema import open_ledger, transaction
from openclaw_rl.models import read_gguf
from support.decoders import FAMILIES
from support.records import Book
from support.tiny_models import CONTROL, TEMPLATE

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


def tensors_of(path: Path) -> dict[str, Any]:
    """The tensors of a GGUF file, in the order of axes that PyTorch has."""
    return {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1].tolist())
        for tensor in gguf.GGUFReader(path).tensors
    }


def fields_of(path: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


def neighbours(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The halves of each head, row by row in turn."""
    size = len(rows) // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


def test_a_gguf_file_has_the_merged_weights_under_the_names_of_llama_cpp(
    tiny_model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    merge_adapter(tiny_model, adapters[0], tmp_path / "merged")
    weights = {name: weight.numpy() for name, weight in load_file(tmp_path / "merged" / "model.safetensors").items()}
    file = tmp_path / "model.gguf"
    GgufExport(tiny_model, fitting_adapter(tiny_model, adapters[0]), "f32").write_model(file, "mine")
    tensors = tensors_of(file)
    assert len(tensors) == len(weights)
    names = {"attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_down": "mlp.down_proj"}
    names |= {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "ffn_up": "mlp.up_proj"}
    for i in range(2):
        for theirs, ours in names.items():
            assert np.array_equal(tensors[f"blk.{i}.{theirs}.weight"], weights[f"model.layers.{i}.{ours}.weight"])
        for side, heads in (("q", 4), ("k", 2)):
            rows = neighbours(weights[f"model.layers.{i}.self_attn.{side}_proj.weight"], heads)
            assert np.array_equal(tensors[f"blk.{i}.attn_{side}.weight"], rows)
    assert np.array_equal(tensors["token_embd.weight"], weights["model.embed_tokens.weight"])
    assert np.array_equal(tensors["output.weight"], weights["lm_head.weight"])
    fields = fields_of(file)
    sizes = {"context_length": 512, "embedding_length": 64, "block_count": 2, "feed_forward_length": 96}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16}
    assert {name: fields[f"llama.{name}"] for name in sizes} == sizes
    assert (fields["general.name"], fields["llama.rope.freq_base"]) == ("mine", 10000.0)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert fields["tokenizer.ggml.tokens"] == tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    control = [tokenizer.convert_tokens_to_ids(text) for text in CONTROL]
    types = np.array(fields["tokenizer.ggml.token_type"])
    assert np.flatnonzero(types == gguf.TokenType.CONTROL).tolist() == sorted(control)
    assert (fields["tokenizer.ggml.model"], fields["tokenizer.ggml.pre"]) == ("gpt2", "gpt-2")
    assert fields["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert fields["tokenizer.ggml.add_bos_token"] is False
    assert fields["tokenizer.chat_template"] == TEMPLATE


def test_transformers_reads_the_gguf_file_as_the_merged_model(
    tiny_model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    file = tmp_path / "model.gguf"
    GgufExport(tiny_model, fitting_adapter(tiny_model, adapters[0]), "f32").write_model(file, "mine")
    model, _ = read_gguf(file)
    with torch.no_grad():
        found = model.eval()(IDS).logits
    assert torch.allclose(found, logits(tiny_model, adapters[0]), atol=1e-4)


@pytest.mark.parametrize(("kind", "gap"), [("f16", 1e-3), ("bf16", 5e-3), ("q8_0", 1e-2)])
def test_weights_are_rounded_and_vectors_are_not(
    kind: str, gap: float, tiny_model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    export = GgufExport(tiny_model, fitting_adapter(tiny_model, adapters[0]), kind)
    export.write_model(tmp_path / "model.gguf", "mine")
    export.write_adapter(tmp_path / "adapter.gguf", "mine")
    for tensor in gguf.GGUFReader(tmp_path / "model.gguf").tensors:
        assert tensor.tensor_type.name == ("F32" if len(tensor.shape) == 1 else kind.upper())
    exact = load_file(tiny_model / "model.safetensors")["model.embed_tokens.weight"].numpy()
    stored = tensors_of(tmp_path / "model.gguf")["token_embd.weight"]
    assert 0 < np.abs(stored - exact).max() <= gap * np.abs(exact).max()
    # Rows of four numbers cannot be cut into blocks.
    kinds = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "adapter.gguf").tensors}
    assert kinds["blk.0.attn_v.weight.lora_b"] == ("F16" if kind == "q8_0" else kind.upper())


def test_an_adapter_alone_is_the_same_change(tiny_model: Path, adapters: list[Path], tmp_path: Path) -> None:
    merge_adapter(tiny_model, adapters[0], tmp_path / "merged")
    merged, base = (load_file(folder / "model.safetensors") for folder in (tmp_path / "merged", tiny_model))
    file = tmp_path / "adapter.gguf"
    GgufExport(tiny_model, fitting_adapter(tiny_model, adapters[0]), "f32").write_adapter(file, "mine")
    tensors, fields = tensors_of(file), fields_of(file)
    assert (fields["general.type"], fields["adapter.type"]) == ("adapter", "lora")
    for theirs, ours, heads in (("attn_k", "self_attn.k_proj", 2), ("ffn_gate", "mlp.gate_proj", 0)):
        down, up = (tensors[f"blk.1.{theirs}.weight.lora_{side}"] for side in "ab")
        change = fields["adapter.lora.alpha"] / len(down) * up @ down
        name = f"model.layers.1.{ours}.weight"
        expected = (merged[name] - base[name]).numpy()
        assert np.allclose(change, neighbours(expected, heads) if heads else expected, atol=1e-5)
    assert len(tensors) == 2 * 2 * 7


def save_family(folder: Path, tiny_model: Path, family: str, **changes: Any) -> Path:
    """A small model of a family with the tiny tokenizer, and with changes to its configuration."""
    config = type(FAMILIES[family])(**{**FAMILIES[family].to_dict(), "vocab_size": 410, **changes})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for path in tiny_model.glob("tokenizer*"):
        shutil.copy(path, folder)
    return folder


def test_a_tied_model_has_one_embedding_and_unused_tokens_for_rows_without_one(
    tiny_model: Path, tmp_path: Path
) -> None:
    model = save_family(tmp_path / "model", tiny_model, "qwen3", tie_word_embeddings=True)
    GgufExport(model, None, "f32").write_model(tmp_path / "model.gguf", "mine")
    tensors, fields = tensors_of(tmp_path / "model.gguf"), fields_of(tmp_path / "model.gguf")
    assert "output.weight" not in tensors
    assert tensors["blk.0.attn_q_norm.weight"].shape == (32,)
    # Qwen rotates halves in llama.cpp too.
    weights = load_file(model / "model.safetensors")
    assert np.array_equal(tensors["blk.0.attn_q.weight"], weights["model.layers.0.self_attn.q_proj.weight"].numpy())
    assert fields["qwen3.attention.key_length"] == 32
    assert fields["tokenizer.ggml.tokens"][-1] == "[PAD409]"
    assert fields["tokenizer.ggml.token_type"][-1] == gguf.TokenType.UNUSED


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("qwen3", {"attention_bias": True}, r"no place for model\.layers\.0\.self_attn\.o_proj\.bias"),
        ("smollm3", {"no_rope_layers": [1, 0, 1]}, "rotate other layers"),
        ("qwen2", {"rope_parameters": FAMILIES["llama-scaled-rope"].rope_parameters}, r"rotates in a way \(llama3\)"),
        ("llama", {"vocab_size": 300}, "has only 300 embeddings"),
    ],
)
def test_what_llama_cpp_would_compute_in_another_way_is_refused_in_a_sentence(
    family: str, changes: dict[str, Any], reason: str, tiny_model: Path, tmp_path: Path
) -> None:
    model = save_family(tmp_path / "model", tiny_model, family, **changes)
    with pytest.raises(UserError, match=reason):
        GgufExport(model, None, "f32").write_model(tmp_path / "model.gguf", "mine")
    assert not (tmp_path / "model.gguf").exists()


def test_a_family_that_cannot_be_written_is_refused_by_the_command(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    config = GraniteConfig(**LlamaConfig.from_pretrained(tiny_model).to_dict() | {"model_type": "granite"})
    GraniteForCausalLM(config).save_pretrained(model)
    adapter = tmp_path / "adapter"
    get_peft_model(GraniteForCausalLM.from_pretrained(model), LoraConfig(target_modules=["q_proj"])).save_pretrained(
        adapter
    )
    for checkpoint in (model, adapter):
        assert gguf_command(model, checkpoint, tmp_path / "out", "--gguf", "f16") == 2
        assert "GraniteForCausalLM cannot be written as GGUF; these can: LlamaForCausalLM" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_without_a_name_in_llama_cpp_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_model, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Punctuation(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.save(str(model / "tokenizer.json"))
    with pytest.raises(UserError, match=r"rules that .* has no name for"):
        GgufExport(model, None, "f32").write_model(tmp_path / "model.gguf", "mine")


def gguf_command(model: Path, checkpoint: Path, out: Path, *more: str) -> int:
    run_dir = str(out.parent / "run")
    return main(["merge", str(checkpoint), str(out), "--model-name", str(model), "--run-dir", run_dir, *more])


def test_the_command_writes_a_gguf_file_and_a_modelfile(
    tiny_model: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gguf_command(tiny_model, adapters[0], tmp_path / "out", "--gguf", "f16") == 0
    assert "ollama create" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["Modelfile", "model.gguf"]
    text = (tmp_path / "out" / "Modelfile").read_text()
    assert text.startswith("FROM ./model.gguf\nTEMPLATE ")
    assert "SYSTEM" not in text
    assert gguf_command(tiny_model, adapters[0], tmp_path / "lora", "--gguf", "f16", "--adapter-only") == 0
    assert sorted(path.name for path in (tmp_path / "lora").iterdir()) == ["Modelfile", "adapter.gguf"]
    assert "ADAPTER ./adapter.gguf" in (tmp_path / "lora" / "Modelfile").read_text()
    assert gguf_command(tiny_model, tiny_model, tmp_path / "base", "--gguf", "f32") == 0
    assert (tmp_path / "base" / "model.gguf").is_file()
    for flags in (["--adapter-only"], ["--with-notes"], ["--gguf", "q2"]):
        assert gguf_command(tiny_model, adapters[0], tmp_path / "no", *flags) == 2
    assert gguf_command(tiny_model, tiny_model, tmp_path / "no", "--gguf", "f32", "--adapter-only") == 2
    assert not (tmp_path / "no").exists()


def test_nothing_unfinished_is_taken_for_a_model(
    tiny_model: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / "killed" / UNFINISHED
    killed.mkdir(parents=True)
    (killed / "model.gguf").write_text("half a file")
    assert gguf_command(tiny_model, adapters[0], tmp_path / "killed", "--gguf", "f16") == 0
    assert sorted(path.name for path in (tmp_path / "killed").iterdir()) == ["Modelfile", "model.gguf"]

    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf, "quantize", interrupted)
    assert gguf_command(tiny_model, adapters[0], tmp_path / "out", "--gguf", "f16") == 130
    assert not (tmp_path / "out").exists()


def test_notes_get_into_the_modelfile_of_who_agrees_and_of_one_user_only(
    tiny_model: Path, adapters: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    with open_ledger(run_dir, create_missing=True) as db, transaction(db):
        kept = notes.add(db, "ada", 'Call me """Ada""".')
        removed = notes.add(db, "ada", "Answer in French.", "language")
        notes.remove(db, removed.number)
        notes.add(db, "ben", "Talk like a pirate.")
    (run_dir / "server.json").write_text("{}")

    def text(out: str, *flags: str) -> str:
        assert gguf_command(tiny_model, adapters[0], tmp_path / out, "--gguf", "f16", *flags) == 0
        return (tmp_path / out / "Modelfile").read_text()

    assert kept.text not in text("silent")
    with_notes = text("flag", "--with-notes", "--user", "ada")
    assert "SYSTEM \"\"\"Call me '''Ada'''.\"\"\"\n" in with_notes
    assert "French" not in with_notes
    assert "pirate" not in with_notes
    assert gguf_command(tiny_model, adapters[0], tmp_path / "x", "--gguf", "f16", "--with-notes", "--user", "eve") == 2
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    for answer in ("n", "", "y"):
        monkeypatch.setattr("builtins.input", lambda _, answer=answer: answer)
        assert ("pirate" in text(f"asked-{answer}", "--user", "ben")) == (answer == "y")


def change(folder: Path) -> dict[str, torch.Tensor]:
    """What an adapter adds to each weight."""
    config, modules = read_adapter(folder)
    return {name: config["lora_alpha"] / config["r"] * pair["B"] @ pair["A"] for name, pair in modules.items()}


def test_the_average_of_lines_is_the_nearest_adapter_of_the_same_rank(
    adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    Book(run_dir).close()
    for name, adapter in zip(("anna", "Ben"), adapters, strict=False):
        folder = line_folder(run_dir, name) / "checkpoints" / "step-000002-v1"
        shutil.copytree(adapter, folder)
        save_file({"moment": torch.ones(2)}, folder / "learner.optimizer")
        write_new_record(folder)
    out = tmp_path / "out"
    assert main(["merge", "--lines", str(out), "--run-dir", str(run_dir)]) == 0
    assert "The average of 2 lines (Ben, anna)" in capsys.readouterr().out
    verify(out)
    rank = json.loads((out / "adapter_config.json").read_text())["r"]
    one, other, average = (change(folder) for folder in (*adapters[:2], out))
    assert average.keys() == one.keys()
    for name, found in average.items():
        wanted = (one[name] + other[name]) / 2
        lost = torch.linalg.svdvals(wanted)[rank:].norm()
        assert torch.isclose((wanted - found).norm(), lost, rtol=1e-3, atol=1e-6)
        assert lost < wanted.norm()
    assert load_file(out / "learner.optimizer")["moment"].tolist() == [0, 0]
    # The average of an adapter with itself is that adapter.
    shutil.rmtree(line_folder(run_dir, "Ben"))
    assert main(["merge", "--lines", str(tmp_path / "none"), "--run-dir", str(run_dir)]) == 2
    shutil.copytree(line_folder(run_dir, "anna"), line_folder(run_dir, "Ben"))
    assert main(["merge", "--lines", str(tmp_path / "same"), "--run-dir", str(run_dir)]) == 0
    same = change(tmp_path / "same")
    assert all(torch.allclose(same[name], one[name], atol=1e-5) for name in one)
