"""Base weights of 4 and 8 bits: what --quantize stores, and folders that are quantised already."""

import json
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config, PreTrainedConfig, Qwen3Config

from openclaw_rl.cli import main
from openclaw_rl.engines.local.families import describe_family, runnable
from openclaw_rl.engines.local.model.codes import NF4, encode
from openclaw_rl.engines.local.model.decoder import Decoder, TensorFiles, load_decoder
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.model.linear import QuantisedLinear, decode
from openclaw_rl.engines.local.model.packed import packed, ways_for
from openclaw_rl.engines.local.model.quantised_modules import QuantisedWeight
from openclaw_rl.engines.local.model.shared_weights import share, take_up
from openclaw_rl.engines.local.model.transformers_decoder import (
    TransformersDecoder,
    attend_alone,
    load_language_model,
    load_transformers_decoder,
)
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, LoadPolicy, PolicyLoaded, WorkerOptions
from openclaw_rl.engines.local.training.trainer import Trainer
from openclaw_rl.engines.memory import BITS
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.types import Span, TrainingSequence
from support.decoders import FAMILIES, TRANSFORMERS_FAMILIES, core_and_more, save_random
from support.trainers import trained_lora
from support.workers import ids, load, request, run

CPU = torch.device("cpu")
#: All sides are multiples of 64, so that every weight has 4 bits.
QWEN = Qwen3Config(
    vocab_size=200,
    hidden_size=128,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
in_4_and_8_bits = pytest.mark.parametrize("quantize", ["4bit", "8bit"])


@in_4_and_8_bits
def test_each_weight_gets_the_nearest_code_and_is_stored_without_further_loss(quantize: str) -> None:
    weight = torch.randn(24, 192) * torch.rand(24, 1)
    weight[3] = 0
    codes, scales = encode(weight, BITS[quantize])
    stored = decode(codes, scales, torch.float32)
    levels = torch.tensor(NF4) if quantize == "4bit" else torch.arange(-127, 128) / 127
    size = 64 if quantize == "4bit" else 192
    largest = weight.view(24, -1, size).abs().amax(2).repeat_interleave(size, 1)
    possible = largest[..., None] * levels
    nearest = (weight[..., None] - possible).abs().amin(-1)
    torch.testing.assert_close((stored - weight).abs(), nearest, atol=1e-6, rtol=1e-4)
    again, same_scales = encode(stored, BITS[quantize])
    assert torch.equal(decode(again, same_scales, torch.float32), stored)
    assert codes.nbytes + scales.nbytes < weight.nbytes * (0.15 if quantize == "4bit" else 0.3)


def as_numbers(decoder: LanguageModel, plain: LanguageModel) -> LanguageModel:
    """A decoder that is not quantised, with the numbers that the codes of the other stand for."""
    if isinstance(decoder, Decoder):
        assert isinstance(plain, Decoder)
        for layer, numbers in zip(decoder.layers, plain.layers, strict=True):
            for name in ("qkv", "o", "gate_up", "down"):
                linear = getattr(layer, name)
                if isinstance(linear, QuantisedLinear):
                    getattr(numbers, name).weight.copy_(linear.dense())
        return plain
    assert isinstance(decoder, TransformersDecoder)
    assert isinstance(plain, TransformersDecoder)
    for path, module in decoder.model.named_modules():
        if isinstance(module, QuantisedWeight):
            owner, _, name = path.rpartition(".")
            at = plain.model.get_submodule(owner)
            (at._parameters[name] if name in at._parameters else getattr(at, name).weight).copy_(module.weight)
    return plain


def configs() -> dict[str, PreTrainedConfig]:
    return {"qwen3-wide": QWEN, "llama": FAMILIES["llama"], **TRANSFORMERS_FAMILIES}


@in_4_and_8_bits
@pytest.mark.parametrize("family", core_and_more(configs(), ("qwen3-wide", "gpt-oss")))
def test_sampler_and_learner_compute_with_one_copy_of_the_numbers(family: str, quantize: str, tmp_path: Path) -> None:
    """Log-probs and gradients are those of a model with the decoded weights, which takes more memory."""
    model = save_random(configs()[family], tmp_path / "model")
    decoder, shared = share(load_language_model(model, torch.float32, CPU, quantize=quantize))
    plain = load_language_model(model, torch.float32, CPU)
    assert decoder.weight_bytes < 0.75 * plain.weight_bytes
    expected = as_numbers(decoder, plain)
    lora = trained_lora(decoder)
    lora.save(tmp_path / "adapter", "model")
    worker = Worker(decoder, WorkerOptions(model, "cpu", "float32", 8, None, 0.02, 4, 4, pack_weights="on"))
    worker.pack()
    assert load(worker, LoadPolicy(1, 1, tmp_path / "adapter")) == PolicyLoaded(1)
    prompt = random.Random(0).choices(range(3, 200), k=30)
    (answer,) = run(worker, [(0, Add(1, request(prompt, temperature=1.0), 1, 1))]).values()
    assert shared is not None
    learners: list[LanguageModel | None] = [take_up(shared), expected]
    length = len(prompt) + len(answer)
    gradients = []
    for learner in learners:
        assert learner is not None
        own = trained_lora(learner)
        trainer = Trainer(learner, own, PolicyLoss())
        old = [token.logprob for token in answer]
        sequence = TrainingSequence([*prompt, *ids(answer)], [Span(0, len(prompt), length, old, [1.0] * len(answer))])
        assert trainer.score([sequence])[0][0] == pytest.approx(old, abs=2e-4)
        trainer.forward_backward([sequence])
        gradients.append([parameter.grad for parameter in own.parameters()])
    for one, other in zip(*gradients, strict=True):
        assert one is not None
        assert other is not None
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_quantised_weights_have_no_packed_copy(tmp_path: Path) -> None:
    decoder = load_decoder(save_random(QWEN, tmp_path), torch.float32, CPU, bits=4)
    assert packed(decoder, ways_for(decoder, "on")) is decoder
    assert all(len(layer.quantised) == 4 for layer in decoder.layers)


# Folders that are quantised already. Each function stores a weight under new names, and returns what it stands for.
Write = Callable[[str, Tensor, dict[str, Tensor]], Tensor]


def bitsandbytes_4bit(name: str, weight: Tensor, out: dict[str, Tensor], block: int = 64) -> Tensor:
    """With scales that are quantised themselves, in blocks of 256."""
    table = torch.tensor(NF4)
    scales = weight.view(-1, block).abs().amax(1)
    offset = float(scales.mean())
    steps = torch.linspace(-1, 1, 256)
    outer = torch.stack([part.abs().max() for part in (scales - offset).split(256)])
    spread = outer.repeat_interleave(256)[: len(scales)]
    inner = (((scales - offset) / spread)[:, None] - steps).abs().argmin(1)
    scales = steps[inner] * spread + offset
    codes = ((weight.view(-1, block) / scales[:, None])[..., None] - table).abs().argmin(-1).flatten()
    state = {"quant_type": "nf4", "blocksize": block, "shape": list(weight.shape), "nested_blocksize": 256}
    state |= {"nested_offset": offset, "dtype": "float32", "nested_dtype": "float32"}
    out[name] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
    out[f"{name}.absmax"] = inner.to(torch.uint8)
    out[f"{name}.quant_map"] = table
    out[f"{name}.nested_absmax"] = outer
    out[f"{name}.nested_quant_map"] = steps
    out[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return (table[codes].view(-1, block) * scales[:, None]).view(weight.shape)


def bitsandbytes_8bit(name: str, weight: Tensor, out: dict[str, Tensor]) -> Tensor:
    most = weight.abs().amax(1)
    codes = (weight * 127 / most[:, None]).round()
    out[name] = codes.to(torch.int8)
    out[name.replace(".weight", ".SCB")] = most
    out[name.replace("weight", "weight_format")] = torch.tensor(0, dtype=torch.uint8)
    return codes * most[:, None] / 127


def packed_words(codes: Tensor, order: list[int]) -> Tensor:
    """[rows, columns] of 4 bits → [rows, columns / 8]; place i of a word holds column order[i] of eight."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= codes.long()[:, column::8] << 4 * place
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def integers(weight: Tensor, groups: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes, zeros and scales of inputs in groups: [in, out], [groups, out] twice; and what they stand for."""
    columns = weight.t()
    count = int(groups.max()) + 1
    low = torch.stack([columns[groups == group].amin(0) for group in range(count)]).clamp(max=0)
    high = torch.stack([columns[groups == group].amax(0) for group in range(count)]).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(1, 15)
    codes = (columns / scales.float()[groups] + zeros[groups]).round().clamp(0, 15)
    return codes, zeros, scales, ((codes - zeros[groups]) * scales.float()[groups]).t()


def gptq(name: str, weight: Tensor, out: dict[str, Tensor]) -> Tensor:
    """With inputs that are not in the order of their groups."""
    groups = torch.arange(weight.shape[1]).flip(0) // 64
    codes, zeros, scales, numbers = integers(weight, groups)
    module = name.removesuffix(".weight")
    out[f"{module}.qweight"] = packed_words(codes.t(), list(range(8))).t().contiguous()
    out[f"{module}.qzeros"] = packed_words(zeros - 1, list(range(8)))
    out[f"{module}.scales"] = scales
    out[f"{module}.g_idx"] = groups.int()
    return numbers


def awq(name: str, weight: Tensor, out: dict[str, Tensor]) -> Tensor:
    codes, zeros, scales, numbers = integers(weight, torch.arange(weight.shape[1]) // 64)
    module = name.removesuffix(".weight")
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    out |= {f"{module}.qweight": packed_words(codes, order), f"{module}.qzeros": packed_words(zeros, order)}
    out[f"{module}.scales"] = scales
    return numbers


FORMATS: dict[str, tuple[Write, dict[str, Any], float]] = {
    "bitsandbytes-4bit": (
        bitsandbytes_4bit,
        {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        0.2,
    ),
    "bitsandbytes-8bit": (bitsandbytes_8bit, {"quant_method": "bitsandbytes", "load_in_8bit": True}, 0.35),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64}, 1),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, 1),
}


def quantised_folder(model: Path, folder: Path, write: Write, settings: dict[str, Any]) -> tuple[Path, Path]:
    """A model whose layers' weights are stored in another format, and one with the numbers that they stand for."""
    tensors = load_file(model / "model.safetensors")
    stored: dict[str, Tensor] = {}
    numbers = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and ".layers." in name and tensor.shape[1] % 64 == 0:
            numbers[name] = write(name, tensor, stored).contiguous()
        else:
            stored[name] = tensor
    config = json.loads((model / "config.json").read_text())
    for at, weights, extra in ((folder / "q", stored, {"quantization_config": settings}), (folder / "n", numbers, {})):
        at.mkdir(parents=True)
        save_file(weights, at / "model.safetensors", metadata={"format": "pt"})
        (at / "config.json").write_text(json.dumps({**config, **extra}))
        (at / "tokenizer.json").write_text("{}")
    return folder / "q", folder / "n"


def logits_of(decoder: LanguageModel) -> Tensor:
    tokens = torch.arange(3, 43)
    with torch.no_grad():
        return decoder.logits(decoder.forward(tokens, torch.arange(40), attend_alone))


@pytest.mark.parametrize("family", ["qwen3-wide", "gemma2"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_folder_that_is_quantised_already_computes_what_it_stands_for(kind: str, family: str, tmp_path: Path) -> None:
    write, settings, share_of_memory = FORMATS[kind]
    model = save_random(configs()[family], tmp_path / "model")
    stored, numbers = quantised_folder(model, tmp_path, write, settings)
    plain = load_language_model(numbers, torch.float32, CPU)
    decoder = load_language_model(runnable(stored), torch.float32, CPU)
    torch.testing.assert_close(logits_of(decoder), logits_of(plain), rtol=1e-4, atol=1e-4)
    said = describe_family(stored)
    assert ("stay as bitsandbytes has stored them" in said) == kind.startswith("bitsandbytes")
    if family == "qwen3-wide":
        outside = sum(tensor.nbytes for tensor in (plain.embed, plain.head) if isinstance(plain, Decoder))  # type: ignore[attr-defined]
        shares = (decoder.weight_bytes - outside) / (plain.weight_bytes - outside)
        assert shares <= share_of_memory
        small = load_language_model(stored, torch.float32, CPU, quantize="4bit")
        assert small.weight_bytes <= decoder.weight_bytes


@pytest.mark.parametrize("family", ["qwen3-wide", "gemma2"])
def test_the_scales_of_bitsandbytes_are_kept_in_bfloat16_too(family: str, tmp_path: Path) -> None:
    write, settings, _ = FORMATS["bitsandbytes-4bit"]
    stored, _ = quantised_folder(save_random(configs()[family], tmp_path / "model"), tmp_path, write, settings)
    whole, narrow = (load_language_model(stored, dtype, CPU) for dtype in (torch.float32, torch.bfloat16))
    pairs = list(zip(quantised_weights(whole), quantised_weights(narrow), strict=True))
    assert pairs
    for one, other in pairs:
        assert torch.equal(decode(*one, torch.float32), decode(*other, torch.float32))


def quantised_weights(model: LanguageModel) -> list[tuple[Tensor, Tensor]]:
    """Codes and scales."""
    if isinstance(model, Decoder):
        return [(linear.weight, linear.scales) for layer in model.layers for linear in layer.quantised]
    assert isinstance(model, TransformersDecoder)
    return [(part.codes, part.scales) for part in model.model.modules() if isinstance(part, QuantisedWeight)]


def test_nf4_in_blocks_of_another_size_loses_nothing(tmp_path: Path) -> None:
    settings = FORMATS["bitsandbytes-4bit"][1]
    model = save_random(QWEN, tmp_path / "model")
    stored, numbers = quantised_folder(model, tmp_path, partial(bitsandbytes_4bit, block=128), settings)
    decoder, plain = (load_language_model(folder, torch.float32, CPU) for folder in (stored, numbers))
    torch.testing.assert_close(logits_of(decoder), logits_of(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"block_structure": [128, 128]}}}},
    ],
)
def test_blocks_of_fp8_have_the_size_that_the_folder_says(settings: dict[str, Any], tmp_path: Path) -> None:
    """The last ones are smaller, if a side is not a multiple of it."""
    scales = {"x.weight_scale_inv": torch.rand(5, 3), "y.weight_scale": torch.rand(576, 1)}
    weights = {f"{name}.weight": torch.ones(576, 300).to(torch.float8_e4m3fn) for name in "xy"}
    save_file({**weights, **scales}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    read = TensorFiles(tmp_path, torch.float32, CPU)
    rows, columns = torch.arange(576)[:, None], torch.arange(300)
    assert torch.equal(read("x.weight"), scales["x.weight_scale_inv"][rows // 128, columns // 128])
    assert torch.equal(read("y.weight"), scales["y.weight_scale"].expand(576, 300)), "rows have scales of their own"


@pytest.mark.more
@pytest.mark.parametrize("family", ["gpt-oss", "qwen3-wide", "qwen3-moe"])
def test_fp8_and_mxfp4_are_decoded_as_transformers_decodes_them(family: str, tmp_path: Path) -> None:
    model = save_random(configs()[family], tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    config = json.loads((model / "config.json").read_text())
    stored: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if family == "gpt-oss" and tensor.dim() == 3:
            experts, inputs, outputs = tensor.shape
            shape = (experts, outputs, inputs // 32, 16)
            stored[f"{name}_blocks"] = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
            stored[f"{name}_scales"] = torch.randint(118, 124, shape[:3], generator=generator).to(torch.uint8)
        elif family != "gpt-oss" and tensor.dim() == 2 and ".layers." in name and "mlp.gate.weight" not in name:
            rows, columns = (-(-side // 32) for side in tensor.shape)
            scales = 0.5 + torch.rand(rows, columns, generator=generator)
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[name.replace("weight", "weight_scale_inv")] = scales
        else:
            stored[name] = tensor
    settings: dict[str, Any] = {"quant_method": "mxfp4"}
    own: Any = Mxfp4Config(dequantize=True)
    if family != "gpt-oss":
        settings = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
        own = FineGrainedFP8Config(weight_block_size=(32, 32), dequantize=True)
    save_file(stored, model / "model.safetensors", metadata={"format": "pt"})
    (model / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    (model / "tokenizer.json").write_text("{}")
    theirs = AutoModelForCausalLM.from_pretrained(model, quantization_config=own, dtype=torch.float32).eval()
    decoder = load_language_model(runnable(model), torch.float32, CPU, compare=True)
    assert "are decoded to the precision" in describe_family(model)
    if isinstance(decoder, TransformersDecoder):
        for name, parameter in theirs.named_parameters():
            # What it has decoded from MXFP4 is in bfloat16, without a loss.
            assert torch.equal(decoder.model.get_parameter(name), parameter.float()), name
        return
    with torch.no_grad():
        expected = theirs(torch.arange(3, 43)[None]).logits[0]
    torch.testing.assert_close(logits_of(decoder), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (("--quantize", "4bit", "--lora-rank", "0"), "--lora-rank 0 needs weights that are not quantised"),
        (("--quantize", "4bit", "--learner-ranks", "2", "--shard-weights"), "--shard-weights needs weights that"),
        (("--quantize", "8bit", "--sampler", "vllm", "--vllm-url", "http://127.0.0.1:9"), "needs --sampler local"),
        (("--quantize", "3bit"), "quantize"),
    ],
)
def test_what_quantised_weights_cannot_do_is_said(
    flags: tuple[str, ...], reason: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = ("--run-dir", str(tmp_path / "run"), "--no-environment", "--model-name", str(tiny_model))
    assert main(["serve", "--dry-run", *run_dir, *flags]) == 2
    assert reason in capsys.readouterr().err


def test_an_experts_weight_that_is_used_as_a_whole_is_decoded_as_a_whole(tmp_path: Path) -> None:
    """Llama 4 multiplies all experts at once."""
    model = save_random(TRANSFORMERS_FAMILIES["llama4"], tmp_path)
    decoder = load_transformers_decoder(model, torch.float32, CPU, 4)
    plain = load_transformers_decoder(model, torch.float32, CPU)
    torch.testing.assert_close(logits_of(decoder), logits_of(as_numbers(decoder, plain)), rtol=1e-3, atol=1e-3)
