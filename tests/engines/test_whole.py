"""Policies whose weights are all their own: gradients are autograd's, files are everybody's, versions mix."""

import random
from pathlib import Path

import pytest
import torch
from test_decoder import FAMILIES
from test_student import batch, options, state
from test_training import over_alternatives, ragged
from test_worker import ids, on_every_device, request, run, transformers_greedy
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from openclaw_rl.engines.base import StepRefused
from openclaw_rl.engines.local.adapters import BadPolicy
from openclaw_rl.engines.local.decoder import load_decoder, take_apart
from openclaw_rl.engines.local.lora import LoraWeights
from openclaw_rl.engines.local.messages import Add, LoadPolicy, PolicyLoaded, WorkerOptions
from openclaw_rl.engines.local.student import Student
from openclaw_rl.engines.local.training import TrainedWeights, Trainer
from openclaw_rl.engines.local.whole import ModelSlots, WholeWeights
from openclaw_rl.engines.local.worker import Worker
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.types import TrainingSequence

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_gets_the_gradient_of_autograd(family: str, checkpointing: bool, tmp_path: Path) -> None:
    theirs = save_family(family, tmp_path)
    sequences = ragged()
    plain_loss(theirs, sequences).backward()
    decoder = load_decoder(tmp_path, torch.float32, CPU)
    weights = WholeWeights.create(decoder, tmp_path)
    trainer = Trainer(decoder, weights, PolicyLoss(), micro_batch_tokens=64, checkpointing=checkpointing)
    metrics = trainer.forward_backward(sequences)
    assert metrics.samples == 7
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
    student = Student(decoder, options(rank=0, model=tiny_model, learning_rate=1e-4))
    student.step(batch(student))
    student.write_policy(tmp_path)
    again = WholeWeights.load(tmp_path, decoder, tiny_model)
    assert all(map(torch.equal, student.weights.parameters(), again.parameters()))
    assert not all(map(torch.equal, WholeWeights.create(decoder, tiny_model).parameters(), again.parameters()))
    theirs = LlamaForCausalLM.from_pretrained(tmp_path)
    written = take_apart(again.masters)
    assert all(torch.equal(own, written[name]) for name, own in theirs.state_dict().items() if name in written)
    assert (tmp_path / "tokenizer.json").exists()


def test_a_student_of_all_weights_learns_takes_back_and_goes_on_exactly(tiny_model: Path, tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model, torch.float32, CPU)
    student = Student(decoder, options(rank=0, model=tiny_model, learning_rate=1e-4))
    untouched = {name: tensor.clone() for name, tensor in take_apart(decoder).items()}
    first = batch(student, advantage=1.0)
    before = student.trainer.score(first)
    student.step(first)
    for one, other in zip(before, student.trainer.score(first), strict=True):
        assert sum(other[0]) > sum(one[0])
    for one, other in zip(before, student.trainer.score(first, base=True), strict=True):
        assert other[0] == pytest.approx(one[0], abs=1e-5)
    saved = state(student, tmp_path / "one")
    second = batch(student, 1)
    assert student.step(second).kl_base > 0
    after = state(student, tmp_path / "two")
    student.undo()
    assert state(student, tmp_path / "undone") == saved
    other = Student(decoder, options(rank=0, model=tiny_model, learning_rate=1e-4))
    other.load(tmp_path / "one")
    other.step(second)
    assert state(other, tmp_path / "resumed") == after
    assert all(torch.equal(tensor, untouched[name]) for name, tensor in take_apart(decoder).items())


@on_every_device
def test_one_batch_mixes_whole_models(tiny_model: Path, tmp_path: Path, device: str) -> None:
    folders = [tiny_model, *(another(tiny_model, tmp_path / str(seed), seed) for seed in (1, 2, 3))]
    decoder = load_decoder(tiny_model, torch.float32, torch.device(device))
    worker = Worker(decoder, WorkerOptions(tiny_model, device, "float32", 8, None, 0.05, 2, 0))
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
    refused = worker.obey(Add(2, request(prompt), 1, 1))
    assert refused is not None


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
    student = Student(decoder, options(rank=4))
    student.save(tmp_path / "adapter")
    with pytest.raises(StepRefused, match="--lora-rank 0 trains all weights"):
        Student(decoder, options(rank=0, model=tiny_model)).load(tmp_path / "adapter")
    whole = Student(decoder, options(rank=0, model=tiny_model))
    whole.save(tmp_path / "whole")
    with pytest.raises(StepRefused, match="give --lora-rank 0"):
        student.load(tmp_path / "whole")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("family", ["llama-biased-tied", "qwen3", "smollm3"])
def test_gradients_on_cuda_are_those_of_the_cpu(family: str, rank: int, tmp_path: Path) -> None:
    save_family(family, tmp_path)
    found = []
    for device in (CPU, torch.device("cuda")):
        decoder = load_decoder(tmp_path, torch.float32, device)
        weights: TrainedWeights = WholeWeights.create(decoder, tmp_path)
        if rank:
            weights = LoraWeights.create(decoder.shape, rank, 8.0, device=device)
            with torch.no_grad():
                for up in weights.b.values():
                    up.fill_(0.01)
        Trainer(decoder, weights, PolicyLoss(), micro_batch_tokens=64).forward_backward(ragged())
        found.append([tensor.grad.cpu() for tensor in weights.parameters() if tensor.grad is not None])
    assert len(found[0]) == len(found[1]) > 4
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-5)
