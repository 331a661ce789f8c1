"""A file of a model or an adapter that is broken is refused in one sentence, whatever is in it."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.cli import main
from openclaw_rl.engines.local.families import runnable
from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.model.model_config import UnsupportedModel
from openclaw_rl.engines.local.model.policy_slots import BadPolicy, read_adapter
from openclaw_rl.errors import UserError
from openclaw_rl.models import ADAPTER_CONFIG, ADAPTER_WEIGHTS, adapter_rank, fetch_model
from openclaw_rl.rendering.chat import ChatRenderer

#: Contents that no reader of these files expects.
CONTENTS = (b"", b"\0" * 100, b"\xff\xfe{}", b'[1, "two", null]', b"null", b'"x"', b"[" * 200_000, b"{" * 9)
#: (file, setting, value): valid JSON that means nothing.
SETTINGS = (
    ("config.json", "architectures", {"a": 1}),
    ("config.json", "head_dim", "x"),
    ("config.json", "dtype", "x"),
    ("config.json", "model_type", "x"),
    ("tokenizer_config.json", "chat_template", [{"name": "default"}]),
    ("tokenizer_config.json", "chat_template", 5),
)


def use(folder: Path, cache: Path) -> None:
    """Do what a server does with a model's files."""
    model = runnable(fetch_model(str(folder), cache))
    renderer = ChatRenderer(model)
    renderer.prompt(renderer.text([{"role": "user", "content": "hi"}]))
    load_decoder(model, torch.float32, torch.device("cpu"))


def assert_refused(folder: Path, name: str) -> None:
    with pytest.raises((UserError, UnsupportedModel)) as refused:
        use(folder, folder / "cache")
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 600
    assert name in str(refused.value)


@pytest.mark.parametrize("content", CONTENTS, ids=range(len(CONTENTS)))
@pytest.mark.parametrize(
    "name", ["config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors.index.json"]
)
def test_a_broken_file_of_a_model_is_named(tiny_model: Path, tmp_path: Path, name: str, content: bytes) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / name).write_bytes(content)
    assert_refused(folder, name)


@pytest.mark.parametrize(("name", "setting", "value"), SETTINGS)
def test_a_setting_that_cannot_be_used_is_refused(
    tiny_model: Path, tmp_path: Path, name: str, setting: str, value: Any
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), setting: value}))
    assert_refused(folder, "template" if setting == "chat_template" else str(folder))


@pytest.mark.parametrize(
    "content", [{"bos_token": {}}, {"eos_token": {"content": 5}}, {"pad_token": [1]}], ids=["empty", "number", "list"]
)
def test_odd_special_tokens_are_no_special_tokens(tiny_model: Path, tmp_path: Path, content: dict) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps(content))
    (folder / "generation_config.json").write_text('{"eos_token_id": {}}')
    use(folder, tmp_path)


def test_an_unreadable_chat_template_is_named(tiny_model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    (folder / "chat_template.jinja").write_bytes(b"\xb7\xff")
    assert_refused(folder, "chat template")


def refusal(call: Callable[..., object], *arguments: object) -> Exception | None:
    """The sentence with which files are refused; None if they are read."""
    try:
        call(*arguments)
    except (UserError, BadPolicy) as error:
        return error
    return None


def cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.99])
def test_truncated_weights_are_named(
    tiny_model: Path, adapters: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    cut(folder / "model.safetensors", share)
    assert_refused(folder, "model.safetensors")
    arguments = ["merge", str(adapters[0]), str(tmp_path / "out"), "--model-name", str(folder)]
    assert main(arguments) == 2
    assert "model.safetensors is damaged" in capsys.readouterr().err


@pytest.fixture(scope="module")
def adapter(adapters: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(adapters[0], tmp_path_factory.mktemp("adapter") / "a"))


@given(
    content=st.one_of(
        st.binary(max_size=50),
        st.sampled_from(CONTENTS),
        st.fixed_dictionaries({"r": st.integers() | st.none(), "lora_alpha": st.integers() | st.text()}).map(
            lambda config: json.dumps(config).encode()
        ),
    )
)
def test_a_broken_adapter_is_refused_or_read(adapter: Path, content: bytes) -> None:
    (adapter / ADAPTER_CONFIG).write_bytes(content)
    for read in (adapter_rank, read_adapter):
        said = refusal(read, adapter)
        assert said is None or str(adapter) in str(said)


def test_a_truncated_adapter_is_refused(adapters: list[Path], tmp_path: Path) -> None:
    folder = shutil.copytree(adapters[0], tmp_path / "a")
    cut(folder / ADAPTER_WEIGHTS, 0.7)
    with pytest.raises(BadPolicy, match="is damaged"):
        read_adapter(folder)


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A GGUF file with everything that a model needs."""
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    sizes: dict[Callable[[int], None], int] = {
        writer.add_block_count: 1,
        writer.add_context_length: 64,
        writer.add_embedding_length: 16,
        writer.add_feed_forward_length: 32,
        writer.add_head_count: 2,
        writer.add_head_count_kv: 2,
        writer.add_vocab_size: 8,
        writer.add_bos_token_id: 5,
        writer.add_eos_token_id: 6,
    }
    for add, size in sizes.items():
        add(size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["a", "b", "c", "d", "ab", "<|im_start|>", "<|im_end|>", "e"])
    writer.add_token_types([1, 1, 1, 1, 1, 3, 3, 1])
    writer.add_token_merges(["a b"])
    shapes = {"token_embd": (8, 16), "output": (8, 16), "output_norm": (16,)}
    shapes |= {f"blk.0.{name}": (16,) for name in ("attn_norm", "ffn_norm")}
    shapes |= {f"blk.0.attn_{name}": (16, 16) for name in ("q", "k", "v", "output")}
    shapes |= {"blk.0.ffn_gate": (32, 16), "blk.0.ffn_up": (32, 16), "blk.0.ffn_down": (16, 32)}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.ones(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def test_a_whole_gguf_file_is_converted(small_gguf: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_gguf)
    assert (fetch_model(str(path), tmp_path / "cache") / "model.safetensors").is_file()


@pytest.mark.parametrize("length", [0, 1, 4, 24, 100, 900, 2000, -1])
def test_a_truncated_gguf_file_is_refused_in_one_sentence(
    small_gguf: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], length: int
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(small_gguf[:length])
    (tmp_path / "turns.jsonl").touch()
    model = ["--model-name", str(path), "--cache-dir", str(tmp_path / "cache")]
    assert main(["import", str(tmp_path / "turns.jsonl"), "--run-dir", str(tmp_path), *model]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"openclaw-rl: {path} could not be read as a model; it may be incomplete: ")
    assert not (tmp_path / "cache").exists()


def test_a_gguf_file_with_other_bytes_is_refused_or_converted(small_gguf: bytes, tmp_path: Path) -> None:
    draw = random.Random(0)
    for number in range(30):
        content = bytearray(small_gguf)
        for _ in range(5):
            content[draw.randrange(900)] ^= 1 << draw.randrange(8)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        refused = refusal(fetch_model, str(path), tmp_path / "cache")
        assert refused is None or str(path) in str(refused)
