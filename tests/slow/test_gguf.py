"""llama.cpp computes from our GGUF files what the local engine computes. Run by `make test-gguf`.

OPENCLAW_RL_GGUF names a Python that has xllamacpp, which is llama.cpp's own code as a package.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from openclaw_rl.cli import main
from openclaw_rl.engines.local.gguf_export import SPLITS, GgufExport
from openclaw_rl.engines.local.merge import fitting_adapter, merge_adapter
from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.models import fetch_model
from support.decoders import LLAMA3_ROPE, SIZE, causal, save_random
from support.llama_cpp import ask
from support.tiny_models import TEMPLATE, tiny_tokenizer

PYTHON = os.environ.get("OPENCLAW_RL_GGUF", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="OPENCLAW_RL_GGUF names no Python with xllamacpp")

LINEAR = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e3}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
#: Larger than the vocabulary of the tokenizer, as in many models.
SIZES = {**SIZE, "vocab_size": 448}
IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama-tied-biased": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "llama-wide-heads": LlamaConfig(**SIZES, head_dim=32),
    "llama-3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-linear-rope": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama-yarn": LlamaConfig(**SIZES, rope_parameters=YARN),
    "mistral": MistralConfig(**SIZES, sliding_window=128),
    "qwen2": Qwen2Config(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "qwen2-yarn": Qwen2Config(**SIZES, rope_parameters=YARN),
    "qwen3": Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True),
    "qwen3-linear-rope": Qwen3Config(**SIZES, rope_parameters=LINEAR),
    "smollm3": SmolLM3Config(**{**SIZES, "num_hidden_layers": 5}, **IDS),
    "smollm3-yarn": SmolLM3Config(**SIZES, **IDS, rope_parameters=YARN),
}
PROMPT = torch.randint(0, 400, (90,), generator=torch.Generator().manual_seed(7)).tolist()
TEXTS = [
    "Hello world, it's 1234567 o'clock!",
    "  leading   spaces\n\n\tand\r\n tabs ",
    "Ünïcödé — 你好世界, привет; 🙂🙂 ﷽",
    "def f(x):\n    return x**2 + 10_000  # I'LL",
    "<|im_start|>user\nhello<|im_end|>\n",
    "CamelCaseWords and HTTPServer/path/to//file...",
]


def save_model(folder: Path, config: PreTrainedConfig) -> Path:
    """A model with random weights of all kinds, norms and biases too, and the tiny tokenizer."""
    save_random(config, folder)
    save_tokenizer(folder, tiny_tokenizer())
    return folder


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    bos, eos = ("<|im_start|>", "<|im_end|>") if tokenizer.token_to_id("<s>") is None else ("<s>", "</s>")
    named = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=eos, bos_token=bos)
    named.chat_template = TEMPLATE
    named.save_pretrained(folder)


def save_adapter(model: Path, folder: Path) -> Path:
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=9, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(model), config).save_pretrained(folder)
    return folder


def ours(folder: Path, prompt: list[int]) -> torch.Tensor:
    """Log-probs of the next token, by the local engine's decoder."""
    decoder = load_decoder(folder, torch.float32, torch.device("cpu"))
    with torch.inference_mode():
        hidden = decoder.forward(torch.tensor(prompt), torch.arange(len(prompt)), causal)
        return decoder.logits(hidden[-1:])[0].double().log_softmax(-1)


def theirs(found: list[list[float]]) -> torch.Tensor:
    values = torch.full((len(found),), torch.nan, dtype=torch.double)
    for token, logprob in found:
        values[int(token)] = logprob
    return values


def gap(model: Path, lora: Path | None, expected: torch.Tensor, prompt: list[int] = PROMPT) -> float:
    """The largest difference of a log-prob, over the whole vocabulary."""
    found = theirs(ask(PYTHON, model, lora, prompts=[prompt])["logprobs"][0])
    assert found.argmax() == expected.argmax()
    return float((found - expected).abs().max())


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


@pytest.mark.parametrize("name", MODELS)
def test_every_family_whole_and_as_lora(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path / "model", MODELS[name])
    adapter = save_adapter(model, tmp_path / "adapter")
    merge_adapter(model, adapter, tmp_path / "merged")
    base, adapted = ours(model, PROMPT), ours(tmp_path / "merged", PROMPT)
    assert (base - adapted).abs().max() > 0.5
    fitting = fitting_adapter(model, adapter)
    GgufExport(model, None, "f32").write_model(tmp_path / "base.gguf", name)
    GgufExport(model, fitting, "f32").write_model(tmp_path / "whole.gguf", name)
    GgufExport(model, fitting, "f32").write_adapter(tmp_path / "lora.gguf", name)
    gaps = (
        gap(tmp_path / "base.gguf", None, base),
        gap(tmp_path / "whole.gguf", None, adapted),
        gap(tmp_path / "base.gguf", tmp_path / "lora.gguf", adapted),
    )
    say(f"{name}: largest difference of a log-prob: base {gaps[0]:.1e}, whole {gaps[1]:.1e}, LoRA {gaps[2]:.1e}")
    assert max(gaps) < 1e-3


def byte_level(splitter: Any, *, ignore_merges: bool = False) -> Tokenizer:
    """BPE over bytes behind a splitter, trained on the texts, so that most of them is merged."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=430, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXTS * 4, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|im_start|>", "<|im_end|>")])
    tokenizer.add_tokens([AddedToken("HTTPServer", special=False)])
    return tokenizer


def split_by(pattern: str, ignore_merges: bool) -> Tokenizer:
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    behind = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return byte_level(pre_tokenizers.Sequence([split, behind]), ignore_merges=ignore_merges)


def sentencepiece(*, legacy: bool) -> Tokenizer:
    """As Transformers writes tokenizers of Llama 2 and the first Mistral."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    if legacy:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=440, special_tokens=["<unk>", "<s>", "</s>", *bytes_], show_progress=False)
    tokenizer.train_from_iterator(["Hello world, it's path and words", "to file return words"] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


TOKENIZERS = {
    "gpt-2": lambda: byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "smollm": lambda: byte_level(
        pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    **{
        name: (lambda pattern=pattern, whole=whole: split_by(pattern, whole))
        for (pattern, whole), name in SPLITS.items()
    },
    "sentencepiece": lambda: sentencepiece(legacy=False),
    "sentencepiece-legacy": lambda: sentencepiece(legacy=True),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_texts_have_the_same_tokens(name: str, tmp_path: Path) -> None:
    model = save_model(tmp_path, MODELS["llama"])
    tokenizer = TOKENIZERS[name]()
    save_tokenizer(model, tokenizer)
    GgufExport(model, None, "f16").write_model(tmp_path / "model.gguf", name)
    # Where a text begins with a space, the newer form adds no other in Transformers; SentencePiece itself does.
    texts = [text.lstrip() for text in TEXTS] if name == "sentencepiece" else TEXTS
    expected = [tokenizer.encode(text).ids for text in texts]
    assert ask(PYTHON, tmp_path / "model.gguf", texts=texts)["ids"] == expected


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The embedded model, and a random adapter for it that changes it by about as much as training does."""
    folder = fetch_model(None, Path("~/.cache/openclaw-rl").expanduser())
    adapter = tmp_path_factory.mktemp("embedded") / "adapter"
    torch.manual_seed(2)
    config = LoraConfig(r=8, lora_alpha=1, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(folder), config).save_pretrained(adapter)
    return folder, adapter


#: The largest difference of a log-prob, which is one of the least likely tokens where weights are rounded.
BOUNDS = {"f32": 0.01, "f16": 0.2, "bf16": 1.0, "q8_0": 2.0}


def test_the_embedded_model_by_the_command(embedded: tuple[Path, Path], tmp_path: Path) -> None:
    model, adapter = embedded
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(question).ids
    merge_adapter(model, adapter, tmp_path / "merged")
    expected = ours(tmp_path / "merged", prompt)
    assert (expected - ours(model, prompt)).abs().max() > 0.1
    flags = ["--model-name", str(model), "--run-dir", str(tmp_path / "run")]
    for kind, bound in BOUNDS.items():
        out = tmp_path / kind
        assert main(["merge", str(adapter), str(out), "--gguf", kind, *flags]) == 0
        size = (out / "model.gguf").stat().st_size
        found = gap(out / "model.gguf", None, expected, prompt)
        say(f"{kind}: {size / 1e6:.0f} MB, largest difference of a log-prob {found:.1e}")
        assert found < bound
    assert main(["merge", str(model), str(tmp_path / "base"), "--gguf", "f32", *flags]) == 0
    assert main(["merge", str(adapter), str(tmp_path / "lora"), "--gguf", "f32", "--adapter-only", *flags]) == 0
    found = gap(tmp_path / "base" / "model.gguf", tmp_path / "lora" / "adapter.gguf", expected, prompt)
    say(f"LoRA: largest difference of a log-prob {found:.1e}")
    assert found < BOUNDS["f32"]
    texts = [question, *TEXTS]
    assert ask(PYTHON, tmp_path / "base" / "model.gguf", texts=texts)["ids"] == [
        tokenizer.encode(text).ids for text in texts
    ]
