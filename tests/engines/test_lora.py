"""LoRA weights: PEFT's initialisation and PEFT's files, exact in float32, read by PEFT and by the sampler."""

import json
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from openclaw_rl.engines.local.model.decoder import Decoder, load_decoder
from openclaw_rl.engines.local.model.policy_slots import AdapterSlots, BadPolicy
from openclaw_rl.engines.local.training.lora import Dropout, LoraWeights
from openclaw_rl.engines.local.training.trainer import Trainer
from openclaw_rl.engines.options import LINEAR_MODULES
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.types import Span, TrainingSequence
from support.decoders import causal
from support.trainers import trained_lora

CPU = torch.device("cpu")
IDS = list(range(5, 45))


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return load_decoder(tiny_model, torch.float32, CPU)


def logprobs(decoder: Decoder, lora: LoraWeights) -> list[float]:
    whole = TrainingSequence(IDS, [Span(0, 1, len(IDS), [], [])])
    return Trainer(decoder, lora, PolicyLoss()).score([whole])[0][0]


def from_logits(logits: torch.Tensor) -> list[float]:
    chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(IDS[1:])[:, None])
    return chosen.squeeze(1).tolist()


def test_files_come_back_bit_for_bit(decoder: Decoder, tmp_path: Path) -> None:
    lora = trained_lora(decoder, dropout=0.1)
    lora.save(tmp_path, "base")
    again = LoraWeights.load(tmp_path, decoder.shape)
    assert (again.rank, again.alpha, again.dropout) == (4, 9, 0.1)
    assert list(again.a) == list(lora.a) == list(LINEAR_MODULES)
    assert len(lora.parameters()) == 2 * len(LINEAR_MODULES)
    for one, other in zip(lora.parameters(), again.parameters(), strict=True):
        assert one.equal(other)
        assert other.requires_grad
        assert other.dtype == torch.float32


@pytest.mark.parametrize(
    "modules", [LINEAR_MODULES, ("q_proj", "v_proj"), ("up_proj", "o_proj"), ("k_proj", "down_proj")]
)
def test_peft_and_the_sampler_read_what_was_saved(
    decoder: Decoder, tiny_model: Path, tmp_path: Path, modules: tuple[str, ...]
) -> None:
    lora = trained_lora(decoder, modules=modules)
    lora.save(tmp_path, str(tiny_model))
    theirs = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_model), tmp_path)
    slots = AdapterSlots(decoder.shape, 1, 8, torch.float32, CPU)
    slots.load(1, tmp_path)
    ids = torch.tensor(IDS)
    with torch.no_grad():
        peft = theirs(ids[None]).logits[0]
        hidden = decoder.forward(ids, torch.arange(len(IDS)), causal, slots.adapt([(0, len(IDS), 1)]))
        base = decoder.logits(decoder.forward(ids, torch.arange(len(IDS)), causal))
    assert (peft - base).abs().max() > 0.05
    torch.testing.assert_close(decoder.logits(hidden), peft, rtol=1e-4, atol=1e-4)
    assert logprobs(decoder, lora) == pytest.approx(from_logits(peft), abs=1e-4)


def test_keys_and_config_are_those_that_peft_writes(decoder: Decoder, tiny_model: Path, tmp_path: Path) -> None:
    LoraWeights.create(decoder.shape, 4, 8).save(tmp_path / "ours", str(tiny_model))
    settings = LoraConfig(r=4, lora_alpha=8, target_modules=list(LINEAR_MODULES), task_type="CAUSAL_LM")
    get_peft_model(LlamaForCausalLM.from_pretrained(tiny_model), settings).save_pretrained(tmp_path / "theirs")
    ours, theirs = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert {key: tensor.shape for key, tensor in ours.items()} == {key: t.shape for key, t in theirs.items()}
    written, expected = (
        json.loads((tmp_path / side / "adapter_config.json").read_text()) for side in ("ours", "theirs")
    )
    written["target_modules"].sort()
    expected["target_modules"].sort()
    assert written == {key: expected[key] for key in written}


def test_a_peft_adapter_is_gone_on_with(decoder: Decoder, tiny_model: Path, adapters: list[Path]) -> None:
    theirs = PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tiny_model), adapters[0])
    with torch.no_grad():
        expected = from_logits(theirs(torch.tensor(IDS)[None]).logits[0])
    assert logprobs(decoder, LoraWeights.load(adapters[0], decoder.shape)) == pytest.approx(expected, abs=1e-4)


def test_rank_stabilised_adapters_keep_their_scale(decoder: Decoder, adapters: list[Path], tmp_path: Path) -> None:
    config = json.loads((adapters[0] / "adapter_config.json").read_text())
    tensors = (adapters[0] / "adapter_model.safetensors").read_bytes()
    (tmp_path / "adapter_model.safetensors").write_bytes(tensors)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"use_rslora": True}))
    lora = LoraWeights.load(tmp_path, decoder.shape)
    assert lora.alpha / lora.rank == config["lora_alpha"] / config["r"] ** 0.5


def test_adapters_that_do_not_fit_are_refused(decoder: Decoder, adapters: list[Path], tmp_path: Path) -> None:
    import dataclasses

    for change in ({"hidden": 32}, {"layers": 3}, {"layers": 1}):
        with pytest.raises(BadPolicy, match="layer"):
            LoraWeights.load(adapters[0], dataclasses.replace(decoder.shape, **change))
    with pytest.raises(BadPolicy, match="lm_head"):
        LoraWeights.create(decoder.shape, 4, 8, modules=["q_proj", "lm_head"])


def test_a_fresh_adapter_is_as_peft_draws_it_and_changes_nothing(decoder: Decoder) -> None:
    fresh = LoraWeights.create(decoder.shape, 64, 8, seed=3)
    again, other = LoraWeights.create(decoder.shape, 64, 8, seed=3), LoraWeights.create(decoder.shape, 64, 8, seed=4)
    for name, a in fresh.a.items():
        reference = torch.empty(64, a.shape[2])
        torch.nn.init.kaiming_uniform_(reference, a=5**0.5)
        assert a.abs().max().item() == pytest.approx(reference.abs().max().item(), rel=0.02)
        assert a.std().item() == pytest.approx(reference.std().item(), rel=0.05)
        assert a.equal(again.a[name])
        assert not a.equal(other.a[name])
    base = Trainer(decoder, fresh, PolicyLoss()).score([TrainingSequence(IDS, [Span(0, 1, 40, [], [])])], base=True)
    assert logprobs(decoder, fresh) == base[0][0]


def test_dropout_drops_its_share_keeps_the_mean_and_repeats_itself() -> None:
    like = torch.empty(400, 300)
    factors = Dropout(0.25, seed=5)(like)
    assert factors.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert factors.mean().item() == pytest.approx(1, abs=0.01)
    assert factors.equal(Dropout(0.25, seed=5)(like))
    assert not factors.equal(Dropout(0.25, seed=6)(like))
