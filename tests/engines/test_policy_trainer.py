"""A step follows the advantages, is made whole or not at all, and training resumes from a checkpoint exactly."""

import dataclasses
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from openclaw_rl.engines import transaction
from openclaw_rl.engines.base import StepRefused
from openclaw_rl.engines.local.model.decoder import Decoder, load_decoder
from openclaw_rl.engines.local.training.packing import MicroBatch, micro_batches
from openclaw_rl.engines.local.training.policy_trainer import MAX_HALVINGS
from openclaw_rl.engines.local.training.trainer import Trainer
from openclaw_rl.engines.transaction import STEP_TRIALS
from openclaw_rl.types import LossSettings, Span, TrainingSequence
from support.trainers import VOCABULARY, InProcessLearner, batch, fresh, options, state, trained


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """So small a model is faster without helpers."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return load_decoder(tiny_model, torch.float32, torch.device("cpu"))


def means(learner: InProcessLearner, sequences: Sequence[TrainingSequence]) -> list[float]:
    return [sum(own) / len(own) for spans in learner.trainer.score(sequences) for own in spans]


# direction


def test_a_step_makes_good_answers_likelier_and_bad_ones_less_likely(decoder: Decoder) -> None:
    learner = InProcessLearner(decoder, options())
    sequences = batch(learner, count=6)
    signs = [sequence.spans[0].advantages[0] for sequence in sequences]
    assert set(signs) == {-1.0, 1.0}
    before = means(learner, sequences)
    for _ in range(5):
        result = learner.step(fresh(learner, sequences))
        assert result.grad_norm > 0
        assert 0 < result.kl_old < 0.5
        assert result.response_tokens == sum(len(sequence.spans[0].advantages) for sequence in sequences)
    for sign, was, now in zip(signs, before, means(learner, sequences), strict=True):
        assert (now - was) * sign > 0


def test_of_one_answer_each_token_moves_as_its_own_advantage_says(decoder: Decoder) -> None:
    learner = InProcessLearner(decoder, options(loss=LossSettings("importance_sampling")))
    (sequence,) = batch(learner, 1, count=1)
    span = sequence.spans[0]
    advantages = [1.0 if i % 2 else -1.0 for i in range(span.stop - span.start)]
    sequence = TrainingSequence(sequence.ids, [dataclasses.replace(span, advantages=advantages)])
    (before,) = learner.trainer.score([sequence])[0]
    for _ in range(20):
        learner.step(fresh(learner, [sequence]))
    (after,) = learner.trainer.score([sequence])[0]
    moved = [(now - was) * sign > 0 for was, now, sign in zip(before, after, advantages, strict=True)]
    assert sum(moved) >= 0.9 * len(moved)


def test_a_fresh_policy_is_the_base_model(decoder: Decoder) -> None:
    learner = InProcessLearner(decoder, options())
    sequences = batch(learner)
    assert learner.trainer.score(sequences) == learner.trainer.score(sequences, base=True)
    assert learner.step(sequences).kl_base == 0
    assert learner.step(fresh(learner, sequences)).kl_base > 0


def test_a_long_answer_does_not_dominate_a_short_one(decoder: Decoder) -> None:
    """Mistake 7: two answers with opposite signs and the same last token; neither's length decides."""
    draw = random.Random(3)
    ids = [draw.randrange(VOCABULARY) for _ in range(120)]
    long = TrainingSequence(ids, [Span(1, 20, 120, [0.0] * 100, [1.0] * 100)])
    short = TrainingSequence([*ids[50:70], 7], [Span(2, 20, 21, [0.0], [-1.0])])
    learner = InProcessLearner(decoder, options(max_grad_norm=1e9, loss=LossSettings("importance_sampling")))

    def norm(*sequences: TrainingSequence) -> float:
        learner.trainer.forward_backward(fresh(learner, sequences))
        total = (
            torch.stack([p.grad.norm() for p in learner.trainer.weights.parameters() if p.grad is not None])
            .norm()
            .item()
        )
        for parameter in learner.trainer.weights.parameters():
            parameter.grad = None
        return total

    # The mean over tokens: a hundred tokens that pull apart weigh less than one, never a hundred times as much.
    assert norm(long) < 2 * norm(short)
    step = learner.step(fresh(learner, [long, short]))
    assert step.response_tokens == 101
    before = learner.trainer.score([short], base=True)[0][0][0]
    assert learner.trainer.score([short])[0][0][0] < before


def test_epochs_are_steps_of_the_optimiser_and_later_ones_clip(decoder: Decoder) -> None:
    """Mistake 8: with Adam, doing the same twice in one step is no change at all."""
    once, twice = (
        InProcessLearner(decoder, options(epochs=epochs, learning_rate=5e-2, max_kl=100)) for epochs in (1, 4)
    )
    sequences = batch(once)
    one, other = once.step(sequences), twice.step(sequences)
    assert one.clip_fraction == 0
    assert other.clip_fraction > 0
    assert not all(map(torch.equal, once.trainer.weights.parameters(), twice.trainer.weights.parameters()))
    steps = {name: value for name, value in twice.trainer._moments().items() if name.endswith("step")}
    assert set(map(float, steps.values())) == {4.0}


def test_the_penalty_for_drifting_holds_the_policy_back(decoder: Decoder) -> None:
    free, held = (
        InProcessLearner(decoder, options(loss=LossSettings(kl_coef=coef), max_kl=100)) for coef in (0.0, 5.0)
    )
    for learner in (free, held):
        for _ in range(10):
            learner.step(batch(learner, count=3, advantage=1.0))
    sequences = batch(free, count=3, advantage=1.0)
    assert held.step(fresh(held, sequences)).kl_base < free.step(sequences).kl_base


def test_a_forced_token_is_not_held_back(decoder: Decoder) -> None:
    """The policy did not choose it, so the penalty for drifting has no gradient there."""
    learner = trained(decoder, 3, loss=LossSettings(kl_coef=5.0), max_kl=100)
    sequences = batch(learner, count=3, advantage=0.0)
    forced = [
        dataclasses.replace(one, spans=[dataclasses.replace(s, forced=[True] * (s.stop - s.start)) for s in one.spans])
        for one in sequences
    ]
    norms = []
    for case in (forced, sequences):
        for parameter in learner.trainer.weights.parameters():
            parameter.grad = None
        learner.trainer.forward_backward(case)
        norms.append(sum(float(p.grad.abs().sum()) for p in learner.trainer.weights.parameters() if p.grad is not None))
    assert norms[0] == 0.0
    assert norms[1] > 0.0


# whole or not at all


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.more), 0.2])
@pytest.mark.parametrize("cause", ["max_kl", "advantage", "custom"])
@pytest.mark.parametrize("steps", [pytest.param(0, marks=pytest.mark.more), 2])
def test_a_refused_step_leaves_everything_bit_for_bit_as_it_was(
    decoder: Decoder, tmp_path: Path, cause: str, steps: int, dropout: float
) -> None:
    learner = trained(decoder, steps, dropout=dropout, max_kl=5.0, epochs=2)
    before = state(learner, tmp_path / "before")
    sequences = batch(learner, 9)
    learner.change_training(max_kl=1e-12 if cause == "max_kl" else 5.0)
    if cause == "advantage":
        sequences = [
            dataclasses.replace(s, spans=[dataclasses.replace(s.spans[0], advantages=[float("nan")] * n)])
            for s in sequences
            for n in [len(s.spans[0].advantages)]
        ]
    if cause == "custom":
        learner.trainer.trainer.loss = custom(tmp_path, "return logprobs * float('nan')")
    match = {"max_kl": "--max-kl", "advantage": "not finite", "custom": "not finite"}[cause]
    with pytest.raises(StepRefused, match=match):
        learner.step(sequences)
    assert state(learner, tmp_path / "after") == before
    with pytest.raises(StepRefused, match="no step"):
        learner.undo()
    # And the next step is the one that would have been made without the refused one.
    learner.change_training(max_kl=5.0)
    learner.trainer.trainer.loss = learner.trainer.loss
    learner.step(batch(learner, 5))
    other = trained(decoder, steps, dropout=dropout, max_kl=5.0, epochs=2)
    other.step(batch(other, 5))
    assert state(learner, tmp_path / "one") == state(other, tmp_path / "other")


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_answer_that_the_policy_would_not_have_given_is_learned_within_the_limit(
    decoder: Decoder, advantage: float
) -> None:
    """As an imported one: its tokens are improbable, and their ratios say more than the policy has moved."""
    learner = InProcessLearner(decoder, options(learning_rate=2e-2, max_kl=0.5))
    assert learner.step(batch(learner, advantage=advantage)).kl_old > 0
    runaway = InProcessLearner(decoder, options(learning_rate=2.0, max_kl=0.5))
    with pytest.raises(StepRefused, match="--max-kl"):
        runaway.step(batch(runaway, advantage=advantage))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("steps", [0, 2])
def test_a_step_that_is_taken_back_never_was(decoder: Decoder, tmp_path: Path, steps: int, dropout: float) -> None:
    learner = trained(decoder, steps, dropout=dropout)
    before = state(learner, tmp_path / "before")
    learner.step(batch(learner, 9))
    assert state(learner, tmp_path / "between") != before
    learner.undo()
    assert state(learner, tmp_path / "after") == before
    with pytest.raises(StepRefused, match="no step"):
        learner.undo()


def test_every_micro_batch_drops_other_values(decoder: Decoder, tmp_path: Path) -> None:
    learner = trained(decoder, 1, learning_rate=2e-2, max_kl=100, dropout=0.5)
    (sequence, *_) = sequences = batch(learner, 7)
    first, second = (learner.trainer.forward_backward([sequence]).logprobs for _ in range(2))
    assert first != second
    before = json.loads(state(learner, tmp_path / "before")["learner.json"])["micro_batches"]
    learner.change_training(epochs=3)
    learner.step(sequences)
    after = json.loads(state(learner, tmp_path / "after")["learner.json"])["micro_batches"]
    assert after - before == 3 * len(micro_batches(sequences, 64, torch.device("cpu")))


def test_what_dropout_does_to_a_pass_is_not_taken_for_a_move_of_the_policy(decoder: Decoder) -> None:
    learner = trained(decoder, 3, dropout=0.0, learning_rate=2e-2, max_kl=100)
    learner.change_training(learning_rate=0.0)
    noisy = dataclasses.replace(learner.trainer.weights, dropout=0.5)
    learner.trainer._take(noisy)
    assert learner.step(batch(learner, 9)).kl_old < 1e-9


# memory


class Cramped(Trainer):
    """Has room for micro-batches of so many tokens."""

    room = 0
    tried: list[int]

    def forward_backward(self, sequences: Sequence[TrainingSequence]) -> Any:
        self.tried.append(self.micro_batch_tokens)
        if self.micro_batch_tokens > self.room:
            # As it happens: in the middle of the work.
            super().forward_backward(sequences[:1])
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return super().forward_backward(sequences)


def cramped(learner: InProcessLearner, room: int) -> list[int]:
    """Give a learner little memory; returns the sizes of micro-batches that it then tries."""
    policy = learner.trainer
    trainer = Cramped(policy.decoder, policy.weights, policy.loss, policy.options.micro_batch_tokens)
    trainer.room, trainer.tried = room, []
    trainer.micro_batches_seen = policy.trainer.micro_batches_seen
    policy.trainer = trainer
    return trainer.tried


def test_a_step_that_does_not_fit_is_made_in_smaller_micro_batches(decoder: Decoder) -> None:
    learner, free = trained(decoder, 1), trained(decoder, 1)
    tried = cramped(learner, 16)
    sequences = batch(free, 4)
    result, expected = learner.step(sequences), free.step(sequences)
    assert tried == [64, 32, 16]
    assert result.loss == pytest.approx(expected.loss, abs=1e-6)
    for one, other in zip(learner.trainer.weights.parameters(), free.trainer.weights.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)
    # The next step tries again with what was asked for: perhaps there is room by then.
    learner.step(batch(learner, 5))
    assert tried == [64, 32, 16, 64, 32, 16]


def test_siblings_are_apart_before_a_step_is_refused(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A micro-batch of siblings exceeds its size so far that halves of it do not fit where each of them does."""
    learner, free = trained(decoder, 1), trained(decoder, 1)
    prompt = [3, 5] * 50
    siblings = [TrainingSequence([*prompt, n, n, n], [Span(n, 100, 103, [], [1.0] * 3)]) for n in range(4)]
    sequences = fresh(free, siblings)
    accumulate = learner.trainer.trainer._accumulate
    sizes: list[int] = []

    def with_room_for_one(sequences: Sequence[TrainingSequence], micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        sizes.append(len(micro_batch.ids))
        if sizes[-1] > 102:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return accumulate(sequences, micro_batch)

    monkeypatch.setattr(learner.trainer.trainer, "_accumulate", with_room_for_one)
    assert learner.step(sequences).loss == pytest.approx(free.step(sequences).loss, abs=1e-6)
    assert sizes == [108, 108, 108, *[102] * 4]


def test_a_step_that_never_fits_is_refused_and_leaves_everything_as_it_was(decoder: Decoder, tmp_path: Path) -> None:
    learner = trained(decoder, 1)
    before = state(learner, tmp_path / "before")
    tried = cramped(learner, 0)
    with pytest.raises(StepRefused, match="does not fit into memory"):
        learner.step(batch(learner, 4))
    assert len(tried) == MAX_HALVINGS + 1
    assert state(learner, tmp_path / "after") == before
    with pytest.raises(StepRefused, match="no step"):
        learner.undo()


@pytest.mark.parametrize("failures", [1, STEP_TRIALS])
def test_an_optimiser_that_runs_out_of_memory_is_tried_again_from_the_snapshot(
    decoder: Decoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    monkeypatch.setattr(transaction, "RETRY_PAUSE_SECONDS", 0.0)
    learner, free = trained(decoder, 1), trained(decoder, 1)
    before = state(learner, tmp_path / "before")
    optimizer, left = learner.trainer.optimizer, [failures]
    step = optimizer.step

    def short_of_memory() -> None:
        step()  # weights have moved when the memory is used up
        left[0] -= 1
        if left[0] >= 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(optimizer, "step", short_of_memory)
    sequences = batch(free, 4)
    if failures == STEP_TRIALS:
        with pytest.raises(StepRefused, match="does not fit into memory"):
            learner.step(sequences)
        assert state(learner, tmp_path / "after") == before
    else:
        assert learner.step(sequences).loss == free.step(sequences).loss
        assert state(learner, tmp_path / "after") == state(free, tmp_path / "free")


@pytest.mark.parametrize("part", ["pass", "optimiser"])
def test_an_error_that_is_not_about_memory_is_not_taken_for_one(decoder: Decoder, part: str) -> None:
    learner = trained(decoder, 0)

    def broken(*_: Any) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    if part == "pass":
        learner.trainer.trainer.forward_backward = broken  # type: ignore[method-assign, assignment]
    else:
        learner.trainer.optimizer.step = broken  # type: ignore[method-assign, assignment]
    with pytest.raises(RuntimeError, match="mat1"):
        learner.step(batch(learner, 4))


# the optimiser


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"learning_rate": 3e-3},
        {"betas": (0.5, 0.7)},
        {"weight_decay": 0.5},
        {"max_grad_norm": 0.01},
    ],
    ids=lambda changed: next(iter(changed), "usual"),
)
def test_steps_are_those_of_adamw_in_float64(
    decoder: Decoder, tiny_model: Path, rank: int, changed: dict[str, Any]
) -> None:
    learner = InProcessLearner(decoder, options(rank=rank, model=tiny_model, **{"max_grad_norm": 1e9, **changed}))
    trainer, training = learner.trainer, learner.trainer.options.training
    parameters = trainer.weights.parameters()
    expected = [parameter.detach().double().requires_grad_() for parameter in parameters]
    adamw = torch.optim.AdamW(
        expected, lr=training.learning_rate, betas=training.betas, weight_decay=training.weight_decay
    )
    norms = []
    for number in range(3):
        # Batches of different sizes: Adam notices a clipped gradient only beside gradients of another norm.
        trainer.forward_backward(batch(learner, number, count=1 + 3 * number))
        for parameter, other in zip(parameters, expected, strict=True):
            assert parameter.grad is not None
            other.grad = parameter.grad.double()
        norm = torch.stack([other.grad.norm() for other in expected if other.grad is not None]).norm().item()
        for other in expected:
            assert other.grad is not None
            other.grad *= min(1.0, training.max_grad_norm / norm)
        adamw.step()
        start = [parameter.detach().double() for parameter in parameters]
        assert trainer.optim_step() == pytest.approx(norm, rel=1e-4)
        norms.append(norm)
        for parameter, other, before in zip(parameters, expected, start, strict=True):
            error = (parameter.detach().double() - other.detach()).norm()
            assert error <= 1e-3 * (other.detach() - before).norm()
    assert max(norms) > 1.2 * min(norms) > 0.02


# going on


@pytest.mark.more
@pytest.mark.parametrize("at", [0, 1, 3])
@pytest.mark.parametrize("given", [{}, {"dropout": 0.2, "epochs": 2}, {"offload": True, "weight_decay": 0.1}])
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(
    decoder: Decoder, tmp_path: Path, at: int, given: dict[str, Any]
) -> None:
    whole = InProcessLearner(decoder, options(**given))
    batches = [batch(whole, seed) for seed in range(4)]
    for number, sequences in enumerate(batches):
        if number == at:
            (tmp_path / "saved").mkdir()
            whole.save(tmp_path / "saved")
        whole.step(sequences)
    resumed = InProcessLearner(decoder, options(**given))
    resumed.step(batches[0])
    resumed.load(tmp_path / "saved")
    results = [resumed.step(sequences) for sequences in batches[at:]]
    assert state(resumed, tmp_path / "one") == state(whole, tmp_path / "other")
    assert resumed.steps == 4
    assert (results[-1].kl_base > 0) == (at < 4)


@pytest.mark.parametrize(("before", "now"), [(0.0, 0.3), (0.3, 0.0)])
def test_dropout_is_what_was_asked_for_now_and_alpha_what_the_adapter_means(
    decoder: Decoder, tmp_path: Path, before: float, now: float
) -> None:
    state(trained(decoder, 2, dropout=before, alpha=6.0), tmp_path / "saved")
    steps = {}
    for dropout in (before, now):
        resumed = InProcessLearner(decoder, options(dropout=dropout, alpha=32.0))
        resumed.load(tmp_path / "saved")
        resumed.step(batch(resumed, 2))
        steps[dropout] = state(resumed, tmp_path / f"resumed-{dropout}")
    assert steps[before]["adapter_model.safetensors"] != steps[now]["adapter_model.safetensors"]
    written = json.loads(steps[now]["adapter_config.json"])
    assert (written["lora_dropout"], written["lora_alpha"]) == (now, 6.0)


def test_beginning_anew_is_as_if_there_had_been_nothing(decoder: Decoder, tmp_path: Path) -> None:
    learner = trained(decoder, 2)
    learner.reset()
    assert state(learner, tmp_path / "one") == state(InProcessLearner(decoder, options()), tmp_path / "other")


@pytest.mark.parametrize("harm", ["adapter_model.safetensors", "learner.optimizer", "learner.json", "rank", "keys"])
def test_a_checkpoint_that_is_not_fit_is_refused_and_what_there_is_stays(
    decoder: Decoder, tmp_path: Path, harm: str
) -> None:
    learner = trained(decoder, 1)
    other = trained(decoder, 2, rank=2 if harm == "rank" else 4)
    folder = tmp_path / "checkpoint"
    state(other, folder)
    if harm == "keys":
        (folder / "learner.json").write_text("{}")
    elif harm != "rank":
        (folder / harm).write_bytes(b"nonsense")
    before = state(learner, tmp_path / "before")
    with pytest.raises(StepRefused, match=r"checkpoint|rank"):
        learner.load(folder)
    assert state(learner, tmp_path / "after") == before


# the owner's own loss


def custom(folder: Path, body: str) -> Any:
    from openclaw_rl.losses.custom_loss import load_loss
    from openclaw_rl.losses.policy import PolicyLoss

    return load_loss(str(custom_file(folder, body)), PolicyLoss())


def custom_file(folder: Path, body: str) -> Path:
    path = folder / f"loss_{abs(hash(body))}.py"
    path.write_text(f"import torch\n\ndef compute_loss(logprobs, old_logprobs, advantages, config):\n    {body}\n")
    return path


def with_loss(decoder: Decoder, folder: Path, body: str, **given: Any) -> InProcessLearner:
    return InProcessLearner(decoder, options(custom_loss=str(custom_file(folder, body)), **given))


def test_a_custom_loss_that_is_the_policy_gradient_makes_the_same_step(decoder: Decoder, tmp_path: Path) -> None:
    own = with_loss(decoder, tmp_path, "return -advantages * (logprobs - old_logprobs).exp()")
    built_in = InProcessLearner(decoder, options(loss=LossSettings("importance_sampling")))
    sequences = batch(own)
    assert own.step(sequences).loss == built_in.step(sequences).loss
    for one, other in zip(own.trainer.weights.parameters(), built_in.trainer.weights.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_custom_loss_is_given_the_settings(decoder: Decoder, tmp_path: Path) -> None:
    body = "assert config['eps_clip'] == 0.3; return -advantages * logprobs"
    with_loss(decoder, tmp_path, body, loss=LossSettings(eps_clip=0.3)).step(
        batch(InProcessLearner(decoder, options()))
    )


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("return logprobs * float('nan')", "not finite"),
        ("return logprobs / 0", "not finite"),
        ("return logprobs.sum()", "one number per token"),
        ("return logprobs[:-1]", "one number per token"),
        ("return 0.5", "one number per token"),
        ("return None", "one number per token"),
        ("return logprobs.detach()", "does not depend"),
        ("return old_logprobs * advantages", "does not depend"),
        ("raise ValueError('no such thing')", r"loss_\d+\.py:4: ValueError: no such thing"),
        ("return torch.zeros(3) + torch.zeros(2)", r"loss_\d+\.py:4: RuntimeError"),
        ("return logprobs.to(torch.complex64)", "the custom loss failed"),
        ("return torch.sqrt(logprobs - logprobs) ", "not finite"),
    ],
)
def test_a_custom_loss_that_cannot_be_used_is_a_sentence_and_changes_nothing(
    decoder: Decoder, tmp_path: Path, body: str, says: str
) -> None:
    learner = with_loss(decoder, tmp_path, body)
    before = state(learner, tmp_path / "before")
    with pytest.raises(StepRefused, match=says):
        learner.step(batch(learner))
    assert state(learner, tmp_path / "after") == before


def test_a_custom_loss_that_runs_out_of_memory_is_tried_in_smaller_micro_batches(
    decoder: Decoder, tmp_path: Path
) -> None:
    body = "\n    ".join(
        [
            "if len(logprobs) > 30: raise torch.OutOfMemoryError('CUDA out of memory')",
            "return -advantages * (logprobs - old_logprobs).exp()",
        ]
    )
    learner = with_loss(decoder, tmp_path, body, micro_batch_tokens=128)
    assert learner.step(batch(learner)).grad_norm > 0


# the adapter


def test_the_adapter_is_a_peft_folder_of_what_was_learned(decoder: Decoder, tiny_model: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    learner = trained(decoder, 3, learning_rate=1e-2, max_kl=100)
    learner.write_policy(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["base_model_name_or_path"] == "tiny"
    sequences = batch(learner, 8)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model), tmp_path).eval()
    for sequence, own in zip(sequences, learner.trainer.score(sequences), strict=True):
        span = sequence.spans[0]
        scores: Tensor = model(torch.tensor([sequence.ids])).logits[0].log_softmax(-1)
        expected = [scores[i - 1, sequence.ids[i]].item() for i in range(span.start, span.stop)]
        assert own[0] == pytest.approx(expected, abs=1e-4)


def test_steps_do_not_depend_on_the_global_random_stream(decoder: Decoder, tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = trained(decoder, 2, dropout=0.3)
    torch.manual_seed(2)
    torch.rand(5)
    other = trained(decoder, 2, dropout=0.3)
    assert state(one, tmp_path / "one") == state(other, tmp_path / "other")
