"""Adapters on experts: files of PEFT, batches of several policies, steps and checkpoints.

What every family computes with them is compared with PEFT in `test_transformers_families` and `test_training`.
"""

import json
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from openclaw_rl.engines.base import StepRefused
from openclaw_rl.engines.local.merge import average_adapters, fitting_adapter, merge_adapter
from openclaw_rl.engines.local.model.experts import grouped, has_experts, inputs_first
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.model.policy_slots import BadPolicy
from openclaw_rl.engines.local.model.transformers_decoder import load_language_model, load_transformers_decoder
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, LoadPolicy, PolicyLoaded, WorkerOptions
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.local.training.trainer import Trainer
from openclaw_rl.errors import UserError
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.types import SampledToken, Span, TrainingSequence
from support.decoders import TRANSFORMERS_FAMILIES, save_random
from support.own_code import ATTENDING, save_with_code
from support.trainers import InProcessLearner, batch, options, state, trained, trained_lora
from support.workers import Answers, ids, load, request, run

CPU = torch.device("cpu")
IDS = list(range(5, 45))
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(TRANSFORMERS_FAMILIES["qwen3-moe"], tmp_path_factory.mktemp("qwen3-moe"))


@pytest.fixture(scope="module")
def decoder(model: Path) -> LanguageModel:
    return load_transformers_decoder(model, torch.float32, CPU)


def scores(decoder: LanguageModel, lora: LoraWeights, ids: list[int] = IDS, start: int = 1) -> list[float]:
    return Trainer(decoder, lora, PolicyLoss()).score([TrainingSequence(ids, [Span(0, start, len(ids), [], [])])])[0][0]


def from_peft(model: Path, adapter: Path, ids: list[int] = IDS, start: int = 1) -> list[float]:
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter).eval()
    with torch.no_grad():
        rows = theirs(torch.tensor([ids])).logits[0, start - 1 : -1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[start:])[:, None]).squeeze(1).tolist()


def save_peft(model: Path, folder: Path) -> Path:
    """An adapter as PEFT makes it."""
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = LoraConfig(
        r=4, lora_alpha=9, target_modules=list(ATTENTION), target_parameters=parameters, task_type="CAUSAL_LM"
    )
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(model), settings)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    theirs.save_pretrained(folder)
    return folder


def test_an_adapter_of_peft_is_gone_on_with_and_written_as_peft_does(
    model: Path, decoder: LanguageModel, tmp_path: Path
) -> None:
    theirs = save_peft(model, tmp_path / "theirs")
    lora = LoraWeights.load(theirs, decoder.shape)
    assert scores(decoder, lora) == pytest.approx(from_peft(model, theirs), abs=1e-4)
    lora.save(tmp_path / "ours", str(model))
    one, other = (load_file(tmp_path / side / "adapter_model.safetensors") for side in ("ours", "theirs"))
    assert one.keys() == other.keys()
    assert all(tensor.equal(other[key]) for key, tensor in one.items())
    written, expected = (
        json.loads((tmp_path / side / "adapter_config.json").read_text()) for side in ("ours", "theirs")
    )
    for config in (written, expected):
        config["target_modules"].sort()
        config["target_parameters"].sort()
    assert written == {key: expected[key] for key in written}


def test_a_fresh_adapter_is_as_peft_draws_it_and_on_attention_alone_unless_asked_for(decoder: LanguageModel) -> None:
    fresh = LoraWeights.create(decoder.shape, 4, 8, experts=True)
    down = fresh.a["mlp.experts.down_proj"]
    assert down.shape == (3, 4, 4, 32)  # layers, experts, rank, inputs
    assert down.abs().max().item() == pytest.approx(32**-0.5, rel=0.02)
    assert not any(b.any() for b in fresh.b.values())
    plain = LoraWeights.create(decoder.shape, 4, 8)
    assert sorted(module.target for module in plain.modules) == sorted(ATTENTION)
    assert scores(decoder, fresh) == pytest.approx(scores(decoder, plain), abs=1e-5)


def served(decoder: LanguageModel, model: Path, adapters: dict[int, Path], slots: list[int]) -> tuple[Worker, Answers]:
    """The answers of one batch: its sequences have the base model (slot 0) or an adapter, which is loaded first."""
    device, dtype = decoder.embed.device.type, str(decoder.embed.dtype).removeprefix("torch.")
    worker = Worker(decoder, WorkerOptions(model, device, dtype, 8, None, 0.02, 4, 4))
    for slot, adapter in adapters.items():
        assert load(worker, LoadPolicy(slot, slot, adapter)) == PolicyLoaded(slot)
    return worker, run(
        worker, [(0, Add(i, request(prompt(i), temperature=1.0), slot, slot)) for i, slot in enumerate(slots)]
    )


def prompt(number: int) -> list[int]:
    return random.Random(number).choices(range(3, 200), k=20 + number)


def logprobs(tokens: list[SampledToken]) -> list[float]:
    return [token.logprob for token in tokens]


def test_a_batch_has_policies_with_and_without_experts_and_the_base(
    model: Path, decoder: LanguageModel, tmp_path: Path
) -> None:
    with_experts = save_peft(model, tmp_path / "experts")
    lora = trained_lora(decoder, experts=False)
    lora.save(tmp_path / "attention", str(model))
    attention = tmp_path / "attention"
    worker, answers = served(decoder, model, {1: with_experts, 2: attention}, [1, 0, 2, 1])
    for i, adapter in ((0, with_experts), (2, attention), (3, with_experts)):
        text = [*prompt(i), *ids(answers[i, 0])]
        assert logprobs(answers[i, 0]) == pytest.approx(from_peft(model, adapter, text, len(prompt(i))), abs=1e-4)
    # A slot that is used again has nothing left of the experts.
    assert load(worker, LoadPolicy(3, 1, attention)) == PolicyLoaded(3)
    again = run(worker, [(0, Add(9, request(prompt(2), temperature=1.0), 3, 1))])
    expected = from_peft(model, attention, [*prompt(2), *ids(again[9, 0])], len(prompt(2)))
    assert logprobs(again[9, 0]) == pytest.approx(expected, abs=1e-4)


def test_training_goes_on_from_a_checkpoint_bit_for_bit(decoder: LanguageModel, tmp_path: Path) -> None:
    whole = InProcessLearner(decoder, options(experts=True))
    batches = [batch(whole, seed) for seed in range(2)]
    whole.step(batches[0])
    state(whole, tmp_path / "saved")
    whole.step(batches[1])
    resumed = trained(decoder, 1, experts=True)
    resumed.load(tmp_path / "saved")
    resumed.step(batches[1])
    assert state(resumed, tmp_path / "one") == state(whole, tmp_path / "other")
    whole.undo()
    assert (
        state(whole, tmp_path / "undone")["adapter_model.safetensors"]
        == (tmp_path / "saved" / "adapter_model.safetensors").read_bytes()
    )
    plain = InProcessLearner(decoder, options())
    with pytest.raises(StepRefused, match=r"on experts, k_proj, .* give the same .* and --lora-experts"):
        plain.load(tmp_path / "saved")


def test_a_model_without_experts_is_refused(tiny_model: Path) -> None:
    with pytest.raises(BadPolicy, match="the model has no experts that an adapter could change"):
        InProcessLearner(load_language_model(tiny_model, torch.float32, CPU), options(experts=True))


@pytest.mark.parametrize(
    ("harm", "sentence"),
    [({"r": 3}, "does not fit its rank"), ({"r": 2}, "has the wrong size for this model")],
    ids=lambda value: str(value),
)
def test_a_damaged_adapter_is_refused(
    model: Path, decoder: LanguageModel, tmp_path: Path, harm: dict[str, int], sentence: str
) -> None:
    adapter = save_peft(model, tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **harm}))
    worker = Worker(decoder, WorkerOptions(model, "cpu", "float32", 8, None, 0.02, 4, 4))
    answer = worker.obey(LoadPolicy(1, 1, adapter))
    assert isinstance(answer, PolicyLoaded)
    assert sentence in str(answer.error)


def test_it_is_merged_by_no_code_of_a_folder_and_not_written_as_gguf(
    model: Path, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = save_peft(model, tmp_path / "adapter")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    ran = save_with_code(tiny_model, tmp_path / "own", ATTENDING)
    with pytest.raises(UserError, match=r"needs its own code .*, which merge does not run"):
        merge_adapter(tmp_path / "own", adapter, tmp_path / "merged")
    assert not ran.exists()
    with pytest.raises(UserError, match="is on experts, which are not written as GGUF"):
        fitting_adapter(model, adapter)


@pytest.mark.parametrize(
    ("gate_up", "down", "known", "first"),
    [
        ((4, 32, 96), (4, 48, 32), True, True),
        ((4, 96, 32), (4, 32, 48), True, False),
        ((6, 96, 32), (4, 32, 48), False, False),
    ],
)
def test_the_layout_of_experts_is_that_of_their_shapes(
    gate_up: tuple[int, ...], down: tuple[int, ...], known: bool, first: bool
) -> None:
    module = SimpleNamespace(gate_up_proj=torch.empty(gate_up), down_proj=torch.empty(down))
    assert has_experts(module) is known
    assert inputs_first(module) is first


def test_the_average_changes_each_expert_as_the_adapters_do_on_average(decoder: LanguageModel, tmp_path: Path) -> None:
    learners = [trained(decoder, steps, experts=True, learning_rate=0.01) for steps in (1, 2)]
    for learner, name in zip(learners, ("one", "other"), strict=True):
        state(learner, tmp_path / name)
    (tmp_path / "average").mkdir()
    average_adapters([tmp_path / "one"] * 2, tmp_path / "average")
    one, same = (LoraWeights.load(tmp_path / name, decoder.shape) for name in ("one", "average"))
    for name in one.a:
        torch.testing.assert_close(same.b[name] @ same.a[name], one.b[name] @ one.a[name], rtol=1e-4, atol=1e-6)
    average_adapters([tmp_path / "one", tmp_path / "other"], tmp_path / "average")
    assert scores(decoder, LoraWeights.load(tmp_path / "average", decoder.shape)) != scores(decoder, one)


@needs_cuda
@pytest.mark.parametrize("outputs_first", [True, False])
@pytest.mark.parametrize("rank", [8, 3])
def test_products_in_groups_on_cuda_and_their_gradients(rank: int, outputs_first: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(40, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    sizes = (rank, 64) if outputs_first else (64, rank)
    weights = torch.randn(5, *sizes, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    ends = torch.tensor([7, 7, 20, 33, 40], dtype=torch.int32, device="cuda")
    found = grouped(x, weights, ends, outputs_first=outputs_first)
    found.float().square().sum().backward()
    own, other = (tensor.detach().double().requires_grad_() for tensor in (x, weights))
    expected = grouped(own, other, ends, outputs_first=outputs_first)
    expected.square().sum().backward()
    for one, reference in ((found, expected), (x.grad, own.grad), (weights.grad, other.grad)):
        assert one is not None
        assert reference is not None
        assert (one.double() - reference).norm() < 0.02 * reference.norm()


@needs_cuda
@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss", "llama4"])
def test_on_cuda_in_bfloat16_base_steps_stay_captured_and_the_learner_agrees(family: str, tmp_path: Path) -> None:
    model = save_random(TRANSFORMERS_FAMILIES[family], tmp_path / "model")
    decoder = load_transformers_decoder(model, torch.bfloat16, torch.device("cuda"))
    trained_lora(decoder).save(tmp_path / "adapter", "model")
    lora = LoraWeights.load(tmp_path / "adapter", decoder.shape, torch.device("cuda"))
    worker, answers = served(decoder, model, {1: tmp_path / "adapter"}, [1, 0, 1])
    assert getattr(worker.runner, "captures", False)
    for i in (0, 2):
        text = [*prompt(i), *ids(answers[i, 0])]
        expected = scores(decoder, lora, text, len(prompt(i)))
        gaps = [abs(one - other) for one, other in zip(logprobs(answers[i, 0]), expected, strict=True)]
        assert sum(gaps) / len(gaps) < 0.15
