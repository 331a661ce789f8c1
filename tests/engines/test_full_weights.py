"""Policies whose weights are all their own: gradients are autograd's, files are everybody's, versions mix."""

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from openclaw_rl.engines.base import StepRefused
from openclaw_rl.engines.local.model.decoder import load_decoder, take_apart
from openclaw_rl.engines.local.model.policy_slots import BadPolicy, ModelSlots
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import (
    Add,
    Cancel,
    LoadPolicy,
    PolicyLoaded,
    RequestFailed,
    Score,
    WorkerOptions,
)
from openclaw_rl.engines.local.training import packed_attention
from openclaw_rl.engines.local.training.full_weights import FullWeights
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.local.training.packed_attention import AttentionCall, FlashKernel
from openclaw_rl.engines.local.training.trainer import TrainedWeights, Trainer
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.types import ScoreRequest, TrainingSequence
from support.decoders import FAMILIES
from support.trainers import InProcessLearner, batch, options, state
from support.training_sequences import over_alternatives, ragged, relatives
from support.workers import ids, on_every_device, request, run, transformers_greedy

pytestmark = pytest.mark.more

CPU = torch.device("cpu")
#: Bytes in which all activations of these tests fit.
PLENTY = 1 << 40
#: A number has 8 significant bits, and errors of three layers add up: to 0.04 on a CPU. Wrong attention gives over 0.2.
BFLOAT16_ERROR = 0.1


def save_family(family: str, folder: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def another(model: Path, folder: Path, seed: int) -> Path:
    """The tiny model with other weights."""
    torch.manual_seed(seed)
    theirs = LlamaForCausalLM.from_pretrained(model)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(folder)
    return folder


def plain_loss(model: torch.nn.Module, sequences: list[TrainingSequence]) -> torch.Tensor:
    """The batch's loss by Transformers' forward, one sequence at a time."""
    total, samples = torch.zeros(()), sum(len(sequence.spans) for sequence in sequences)
    for sequence in sequences:
        logprobs = model(torch.tensor([sequence.ids])).logits[0].log_softmax(-1)
        for span in sequence.spans:
            own = torch.stack([logprobs[i - 1, sequence.ids[i]] for i in range(span.start, span.stop)])
            old, advantages = torch.tensor(span.old_logprobs), torch.tensor(span.advantages)
            tokens = PolicyLoss().per_token(own, old, advantages, None).loss.sum()
            total = total + (tokens + over_alternatives(logprobs, span, PolicyLoss())) / (len(own) * samples)
    return total


@pytest.mark.parametrize("free", [PLENTY, 0])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_gets_the_gradient_of_autograd(family: str, free: int, tmp_path: Path) -> None:
    theirs = save_family(family, tmp_path)
    sequences = [*ragged(), *relatives()]
    plain_loss(theirs, sequences).backward()
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    weights = FullWeights.create(decoder, tmp_path)
    trainer = Trainer(decoder, weights, PolicyLoss(), micro_batch_tokens=64, free=lambda _: free)
    metrics = trainer.forward_backward(sequences)
    assert metrics.response_tokens == sum(span.stop - span.start for s in sequences for span in s.spans)
    ours = dict(theirs.named_parameters())
    masters = {id(tensor): tensor for tensor in weights.parameters()}
    assert all(tensor.grad is not None and tensor.grad.abs().sum() > 0 for tensor in masters.values())
    for tensor in weights.parameters():
        tensor.data = tensor.grad  # so that it is taken apart by name like the weights themselves
    gradients = take_apart(weights.masters)
    assert gradients.keys() == ours.keys() - ({"lm_head.weight"} if FAMILIES[family].tie_word_embeddings else set())
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient.detach(), ours[name].grad, rtol=1e-4, atol=1e-6)


def test_a_policy_is_written_for_everybody_and_read_again_bit_for_bit(tiny_model: Path, tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model, torch.float32, CPU)
    learner = InProcessLearner(decoder, options(rank=0, model=tiny_model, learning_rate=1e-4))
    learner.step(batch(learner))
    learner.write_policy(tmp_path)
    again = FullWeights.load(tmp_path, decoder, tiny_model)
    assert all(map(torch.equal, learner.trainer.weights.parameters(), again.parameters()))
    assert not all(map(torch.equal, FullWeights.create(decoder, tiny_model).parameters(), again.parameters()))
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    written = take_apart(again.masters)
    assert all(torch.equal(own, written[name]) for name, own in theirs.state_dict().items() if name in written)
    assert (tmp_path / "tokenizer.json").exists()


def test_a_policy_of_a_model_in_several_files_is_one_file(tiny_model: Path, tmp_path: Path) -> None:
    """The base model's index names files that the policy does not have: programs would look for them."""
    model = tmp_path / "model"
    LlamaForCausalLM.from_pretrained(tiny_model).save_pretrained(model, max_shard_size="100KB")
    assert list(model.glob("*.index.json"))
    decoder = load_decoder(model, torch.float32, CPU)
    learner = InProcessLearner(decoder, options(rank=0, model=model))
    learner.write_policy(tmp_path / "policy")
    assert not list((tmp_path / "policy").glob("*.index.json"))
    again = FullWeights.load(tmp_path / "policy", decoder, model)
    assert all(map(torch.equal, learner.trainer.weights.parameters(), again.parameters()))


def test_a_student_of_all_weights_learns_takes_back_and_goes_on_exactly(tiny_model: Path, tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model, torch.float32, CPU)
    learner = InProcessLearner(decoder, options(rank=0, model=tiny_model, learning_rate=1e-4))
    untouched = {name: tensor.clone() for name, tensor in take_apart(decoder).items()}
    first = batch(learner, advantage=1.0)
    before = learner.trainer.score(first)
    learner.step(first)
    for one, other in zip(before, learner.trainer.score(first), strict=True):
        assert sum(other[0]) > sum(one[0])
    for one, other in zip(before, learner.trainer.score(first, base=True), strict=True):
        assert other[0] == pytest.approx(one[0], abs=1e-5)
    saved = state(learner, tmp_path / "one")
    second = batch(learner, 1)
    assert learner.step(second).kl_base > 0
    after = state(learner, tmp_path / "two")
    learner.undo()
    assert state(learner, tmp_path / "undone") == saved
    other = InProcessLearner(decoder, options(rank=0, model=tiny_model, learning_rate=1e-4))
    other.load(tmp_path / "one")
    other.step(second)
    assert state(other, tmp_path / "resumed") == after
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in take_apart(decoder).items())


@on_every_device
def test_one_batch_mixes_whole_models(tiny_model: Path, tmp_path: Path, device: str) -> None:
    folders = [tiny_model, *(another(tiny_model, tmp_path / str(seed), seed) for seed in (1, 2, 3))]
    decoder = load_decoder(tiny_model, torch.float32, torch.device(device))
    worker = Worker(decoder, WorkerOptions(tiny_model, device, "float32", 8, None, 0.05, 2, 0), run_ahead=True)
    prompts = [random.Random(seed).choices(range(300), k=50 + seed) for seed in range(4)]
    expected = [[transformers_greedy(LlamaForCausalLM.from_pretrained(f), p) for p in prompts] for f in folders]
    # The second time round one of the slots holds another policy than before.
    for models in ([0, 1, 2], [0, 3, 2]):
        for slot in (1, 2):
            load(worker, LoadPolicy(models[slot], slot, folders[models[slot]]))
        arrivals = [
            (number % 3, Add(10 * slot + number, request(prompts[number]), models[slot], slot))
            for number in range(4)
            for slot in (2, 0, 1)
        ]
        answers = run(worker, arrivals)
        for slot in range(3):
            for number in range(4):
                assert ids(answers[10 * slot + number, 0]) == expected[models[slot]][number]


def load(worker: Worker, command: LoadPolicy) -> None:
    loaded, pieces = worker.obey(command), 0
    while loaded is None:
        loaded, pieces = worker.load_on(), pieces + 1
    assert isinstance(loaded, PolicyLoaded)
    assert loaded.error is None
    assert pieces > 10


def test_requests_are_answered_while_a_model_is_loaded(tiny_model: Path, tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model, torch.float32, CPU)
    worker = Worker(decoder, WorkerOptions(tiny_model, "cpu", "float32", 8, None, 0.05, 2, 0))
    assert worker.obey(LoadPolicy(1, 1, another(tiny_model, tmp_path, 1))) is None
    prompt = random.Random(0).choices(range(300), k=20)
    answers = run(worker, [(0, Add(1, request(prompt), 0))])
    assert ids(answers[1, 0]) == transformers_greedy(LlamaForCausalLM.from_pretrained(tiny_model), prompt)
    assert worker.loading


def test_what_comes_for_a_model_that_is_still_loaded_waits_for_it(tiny_model: Path, tmp_path: Path) -> None:
    folder = another(tiny_model, tmp_path, 1)
    worker = make_whole_worker(tiny_model)
    prompt = random.Random(0).choices(range(300), k=20)
    assert worker.obey(LoadPolicy(1, 1, folder)) is None
    commands = [
        Add(1, request(prompt), 1, 1),
        Add(2, request(prompt, n=3), 1, 1),
        Cancel(2, 1),
        Add(3, request(prompt), 1, 1),
        Score(4, ScoreRequest(prompt, 5, version=1), 1),
        Cancel(3, None),
    ]
    for command in commands:
        assert worker.obey(command) is None
    assert worker.scheduler.idle
    assert not worker.due()
    while worker.loading:
        worker.load_on()
    for command in worker.due():
        assert worker.obey(command) is None
    assert not worker.due(), "each is given once"
    assert len(worker.scheduler.waiting) == 4
    answers = run(worker, [])
    expected = transformers_greedy(LlamaForCausalLM.from_pretrained(folder), prompt)
    assert {key: ids(tokens) for key, tokens in answers.items()} == dict.fromkeys([(1, 0), (2, 0), (2, 2)], expected)


def test_what_waits_for_a_model_that_cannot_be_loaded_is_told_so(tiny_model: Path, tmp_path: Path) -> None:
    worker = make_whole_worker(tiny_model)
    folders = [another(tiny_model, tmp_path / str(seed), seed) for seed in (1, 2)]
    weights = load_file(folders[0] / "model.safetensors")
    last = "model.layers.1.mlp.down_proj.weight"
    save_file({**weights, last: weights[last].to(torch.float8_e4m3fn)}, folders[0] / "model.safetensors")
    for version, folder in enumerate(folders, start=1):
        assert worker.obey(LoadPolicy(version, version, folder)) is None
        assert worker.obey(Add(version, request([1, 2, 3]), version, version)) is None
    loaded = None
    while loaded is None:
        loaded = worker.load_on()
    assert "quantised" in (loaded.error or "")
    (command,) = worker.due()
    assert worker.obey(command) == RequestFailed(1, "Policy version 1 could not be loaded again.")
    assert worker.loading, "the other one goes on, and its request waits"
    assert not worker.due()


def make_whole_worker(model: Path) -> Worker:
    decoder = load_decoder(model, torch.float32, CPU)
    return Worker(decoder, WorkerOptions(model, "cpu", "float32", 8, None, 0.05, 2, 0))


def test_a_folder_that_does_not_fit_is_refused_with_the_reason(
    tiny_model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    decoder = load_decoder(tiny_model, torch.float32, CPU)
    slots = ModelSlots(decoder, 2)
    with pytest.raises(BadPolicy, match="holds an adapter"):
        slots.load(1, adapters[0])
    with pytest.raises(BadPolicy, match=r"no \.safetensors"):
        slots.load(1, tmp_path)
    save_family("llama", tmp_path / "other")
    with pytest.raises(BadPolicy, match="another size"):
        slots.load(1, tmp_path / "other")
    assert slots.model(1) is None
    learner = InProcessLearner(decoder, options(rank=4))
    learner.save(tmp_path / "adapter")
    with pytest.raises(StepRefused, match="--lora-rank 0 trains all weights"):
        InProcessLearner(decoder, options(rank=0, model=tiny_model)).load(tmp_path / "adapter")
    whole = InProcessLearner(decoder, options(rank=0, model=tiny_model))
    whole.save(tmp_path / "whole")
    with pytest.raises(StepRefused, match="use --lora-rank 0"):
        learner.load(tmp_path / "whole")


def gradients(folder: Path, rank: int, device: str, dtype: torch.dtype, loss: PolicyLoss) -> list[torch.Tensor]:
    """Of a batch with shared beginnings, in float32 on the CPU."""
    decoder = load_decoder(folder, dtype, torch.device(device))
    weights: TrainedWeights = FullWeights.create(decoder, folder)
    if rank:
        weights = LoraWeights.create(decoder.shape, rank, 9.0, device=torch.device(device))
        with torch.no_grad():
            for up in weights.b.values():
                up.fill_(0.01)
    Trainer(decoder, weights, loss, micro_batch_tokens=200).forward_backward([*ragged()[:2], *relatives()[:3]])
    return [tensor.grad.cpu() for tensor in weights.parameters() if tensor.grad is not None]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["llama-biased-tied", "qwen3", "smollm3"])
def test_gradients_on_cuda_are_those_of_the_cpu(family: str, rank: int, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    expected, found = (gradients(tmp_path, rank, device, torch.float32, PolicyLoss()) for device in ("cpu", "cuda"))
    assert len(found) == len(expected) > 4
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


@on_every_device
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["llama-biased-tied", "qwen3", "smollm3"])
def test_gradients_in_bfloat16_are_those_of_float32(
    family: str, rank: int, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CUDA through the flash kernel, which computes with 16 bits only. The base weights have 16 bits for both."""
    save_family(family, tmp_path)
    rounded = {name: tensor.bfloat16() for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    save_file(rounded, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kernel, calls = packed_attention.FlashKernel, list[AttentionCall]()

    def counted(call: AttentionCall, on: torch.device) -> FlashKernel:
        calls.append(call)
        return kernel(call, on)

    monkeypatch.setattr(packed_attention, "FlashKernel", counted)
    # Without the clip's corners: rounding must not decide on which side of one a token is.
    loss = PolicyLoss(eps_clip=1e9, eps_clip_high=1e9)
    expected = gradients(tmp_path, rank, "cpu", torch.float32, loss)
    assert not calls
    found = gradients(tmp_path, rank, device, torch.bfloat16, loss)
    assert {call.causal for call in calls} == ({True, False} if device == "cuda" else set())
    assert len(found) == len(expected) > 4
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < BFLOAT16_ERROR * other.norm()


def test_a_policy_of_a_checkpoint_s_model_is_not_taken_for_that_checkpoint(tmp_path: Path) -> None:
    """`--model-name` may be a checkpoint of another run, with that run's records in it."""
    save_family("llama", tmp_path / "model")
    for name in ("checkpoint.json", "learner.json"):
        (tmp_path / "model" / name).write_text("{}")
    base = load_decoder(tmp_path / "model", torch.float32, CPU)
    FullWeights.create(base, tmp_path / "model").save(tmp_path / "saved", "model")
    names = {path.name for path in (tmp_path / "saved").iterdir()}
    assert "config.json" in names
    assert names.isdisjoint({"checkpoint.json", "learner.json"})
