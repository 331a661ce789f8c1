"""Gradients are those of the same loss in Transformers and PEFT, however the work is cut up."""

import dataclasses
import random
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from openclaw_rl.engines.base import PassResult
from openclaw_rl.engines.local.model.decoder import Decoder, Shape, load_decoder
from openclaw_rl.engines.local.model.language_model import LanguageModel
from openclaw_rl.engines.local.model.policy_slots import peft_tensors
from openclaw_rl.engines.local.model.transformers_decoder import load_language_model
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.local.training.trainer import (
    Trainer,
    free_memory,
    kept_numbers,
    recomputed_layers,
    usual_micro_batch,
)
from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.types import Span, TrainingSequence
from support.decoders import FAMILIES, STATE_FAMILIES, TRANSFORMERS_FAMILIES, causal, core_and_more, save_random
from support.trainers import trained_lora
from support.training_sequences import VOCABULARY, over_alternatives, ragged, relatives, sequence

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def decoder(tiny_model: Path) -> Decoder:
    return load_decoder(tiny_model, torch.float32, CPU)


def sampled_alone(sequences: Sequence[TrainingSequence]) -> list[TrainingSequence]:
    """The same without alternatives."""
    return [
        dataclasses.replace(one, spans=[dataclasses.replace(span, alternatives=None) for span in one.spans])
        for one in sequences
    ]


def gradients(
    decoder: LanguageModel,
    sequences: Sequence[TrainingSequence],
    lora: LoraWeights | None = None,
    loss: PolicyLoss | None = None,
    **options: Any,
) -> tuple[list[Tensor], PassResult]:
    lora = lora or trained_lora(decoder)
    metrics = Trainer(decoder, lora, loss or PolicyLoss(), **options).forward_backward(sequences)
    return [
        parameter.grad if parameter.grad is not None else torch.zeros_like(parameter) for parameter in lora.parameters()
    ], metrics


def assert_equal(found: list[Tensor], expected: list[Tensor], tolerance: float = 1e-5) -> None:
    """Each tensor's difference is small beside the tensor."""
    for one, other in zip(found, expected, strict=True):
        assert other.norm() > 0
        assert (one.double() - other.double()).norm() < tolerance * other.double().norm()


def in_peft(
    model: Path, adapter: Path, sequences: list[TrainingSequence], loss: PolicyLoss
) -> tuple[float, dict[str, Tensor]]:
    """The loss and its gradients by parameter, from full logits of one span at a time, in float64."""
    options: Any = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": torch.float64}
    base = AutoModelForCausalLM.from_pretrained(model, **options)
    policy = PeftModel.from_pretrained(base, adapter, is_trainable=True, autocast_adapter_dtype=False).double().eval()
    spans = [(s.ids[: span.stop], span) for s in sequences for span in s.spans]
    total = torch.zeros((), dtype=torch.float64)

    def chosen(scores: Tensor, ids: Sequence[int], span: Span) -> Tensor:
        return torch.stack([scores[i - 1, ids[i]] for i in range(span.start, span.stop)])

    for ids, span in spans:
        scores = policy(torch.tensor([ids])).logits[0].log_softmax(-1)
        with torch.no_grad(), policy.disable_adapter():
            reference = chosen(policy(torch.tensor([ids])).logits[0].log_softmax(-1), ids, span)
        old, advantages = (torch.tensor(column, dtype=torch.float64) for column in (span.old_logprobs, span.advantages))
        own = loss.per_token(chosen(scores, ids, span), old, advantages, reference).loss
        total = total + (own.sum() + over_alternatives(scores, span, loss)) / (len(own) * len(spans))
    total.backward()
    return total.item(), {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("loss", [PolicyLoss("ppo", kl_coef=0.1), PolicyLoss("cispo")], ids=lambda loss: loss.kind)
@pytest.mark.parametrize("family", [pytest.param(family, marks=pytest.mark.more) for family in FAMILIES])
def test_loss_and_gradients_are_those_of_peft_with_full_logits(family: str, loss: PolicyLoss, tmp_path: Path) -> None:
    save_random(FAMILIES[family], tmp_path / "model")
    decoder = load_decoder(tmp_path / "model", torch.float32, CPU)
    check_against_peft(decoder, tmp_path, loss, 1e-4)


EVERY_FAMILY = {**TRANSFORMERS_FAMILIES, **STATE_FAMILIES}


@pytest.mark.parametrize("family", core_and_more(EVERY_FAMILY, ["gpt-oss", "lfm2"]))
def test_gradients_through_transformers_code_are_those_of_peft(family: str, tmp_path: Path) -> None:
    """Packed with shared beginnings here, one span at a time there; in float64, except for norms of some families."""
    save_random(EVERY_FAMILY[family], tmp_path / "model")
    decoder = load_language_model(tmp_path / "model", torch.float64, CPU)
    check_against_peft(decoder, tmp_path, PolicyLoss("ppo", kl_coef=0.1), 5e-5)


def check_against_peft(decoder: LanguageModel, folder: Path, loss: PolicyLoss, tolerance: float) -> None:
    lora = trained_lora(decoder)
    lora.save(folder / "adapter", "model")
    batch = [*ragged(), *relatives()]
    expected_loss, expected = in_peft(folder / "model", folder / "adapter", batch, loss)
    _, metrics = gradients(decoder, batch, lora, loss, micro_batch_tokens=200)
    assert metrics.loss == pytest.approx(expected_loss, abs=1e-5)
    for module in lora.modules:
        a, b = lora.a[module.name].grad, lora.b[module.name].grad
        assert a is not None
        assert b is not None
        for path, *pair in zip(module.paths.values(), a, b, strict=True):
            for key, found in peft_tensors(path, *pair).items():
                assert_equal([found], [expected[key.replace(".weight", ".default.weight")]], tolerance)


@pytest.mark.parametrize("modules", [("q_proj", "v_proj"), ("gate_proj",), ("k_proj", "up_proj", "o_proj")])
def test_modules_without_factors_pass_gradients_on(decoder: Decoder, modules: tuple[str, ...]) -> None:
    part = trained_lora(decoder, modules=modules)
    whole = trained_lora(decoder)
    with torch.no_grad():
        for name in whole.a:
            if name in modules:
                whole.a[name].copy_(part.a[name])
                whole.b[name].copy_(part.b[name])
            else:
                whole.b[name].zero_()
    gradients(decoder, ragged(), part)
    gradients(decoder, ragged(), whole)
    for name in part.a:
        assert_equal([part.a[name].grad, part.b[name].grad], [whole.a[name].grad, whole.b[name].grad])


def test_packed_sequences_are_the_sum_of_separate_ones(decoder: Decoder) -> None:
    batch = ragged()
    packed, _ = gradients(decoder, batch)
    samples = sum(len(sequence.spans) for sequence in batch)
    total = [torch.zeros_like(tensor) for tensor in packed]
    for one in batch:
        alone, _ = gradients(decoder, [one])
        for tensor, part in zip(total, alone, strict=True):
            tensor += part * len(one.spans) / samples
    assert_equal(packed, total)


@pytest.mark.parametrize(
    ("device", "width", "tokens"),
    [("cpu", 1024, 4096), ("cuda", 576, 6144), ("cuda", 1024, 5120), ("cuda", 2560, 2048), ("cuda", 8192, 2048)],
)
def test_micro_batches_suit_the_model_and_its_device(device: str, width: int, tokens: int, decoder: Decoder) -> None:
    assert usual_micro_batch(dataclasses.replace(decoder.shape, hidden=width), torch.device(device)) == tokens


@pytest.mark.parametrize("micro_batch_tokens", [1, 30, 64, 90])
def test_the_size_of_micro_batches_changes_nothing(decoder: Decoder, micro_batch_tokens: int) -> None:
    expected, whole = gradients(decoder, ragged())
    found, cut = gradients(decoder, ragged(), micro_batch_tokens=micro_batch_tokens)
    assert_equal(found, expected)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-5)
    assert (cut.tokens, cut.response_tokens, cut.clipped) == (whole.tokens, whole.response_tokens, whole.clipped)


def test_the_order_of_the_sequences_changes_nothing(decoder: Decoder) -> None:
    expected, forwards = gradients(decoder, ragged())
    found, backwards = gradients(decoder, ragged()[::-1])
    assert_equal(found, expected)
    for one, other in zip(forwards.logprobs, backwards.logprobs[::-1], strict=True):
        assert one == [pytest.approx(span, abs=1e-5) for span in other]


def test_short_memory_changes_nothing(decoder: Decoder) -> None:
    """All layers are computed twice, or one of them."""
    expected, result = gradients(decoder, ragged(), trained_lora(decoder, dropout=0.2))
    nearly = next(free for free in count(0, 5000) if recomputed(decoder.shape, free, result.tokens) == 1)
    for free in (0, nearly):
        found, _ = gradients(decoder, ragged(), trained_lora(decoder, dropout=0.2), free=lambda _, free=free: free)
        assert all(one.equal(other) for one, other in zip(found, expected, strict=True))


def recomputed(shape: Shape, free: int, tokens: int = 200) -> int:
    return recomputed_layers(shape, tokens, 4, free, recorded=False)


def test_layers_are_computed_twice_only_where_memory_is_short(decoder: Decoder) -> None:
    shape = decoder.shape
    kept = 200 * 4 * kept_numbers(shape)
    assert recomputed(shape, 0) == shape.layers
    assert recomputed(shape, 100 * shape.layers * kept) == 0
    counts = [recomputed(shape, free) for free in range(0, 10 * shape.layers * kept, kept // 2)]
    assert counts == sorted(counts, reverse=True)
    assert set(counts) == set(range(shape.layers + 1))
    assert recomputed_layers(shape, 200, 4, kept * shape.layers * 2, recorded=True) > 0
    assert free_memory(torch.device("cpu")) > 0


def test_the_same_input_gives_the_same_bits(decoder: Decoder) -> None:
    (one, first), (other, second) = gradients(decoder, ragged()), gradients(decoder, ragged())
    assert all(a.equal(b) for a, b in zip(one, other, strict=True))
    assert first == second


def test_a_session_is_the_same_as_its_turns_apart(decoder: Decoder) -> None:
    session = sequence(random.Random(3), 80, (10, 18), (30, 33), (50, 70))
    turns = [TrainingSequence(session.ids[: span.stop], [span]) for span in session.spans]
    expected, apart = gradients(decoder, turns)
    found, together = gradients(decoder, [session])
    assert_equal(found, expected)
    assert together.loss == pytest.approx(apart.loss, rel=1e-5)
    assert together.logprobs[0] == [pytest.approx(turn[0], abs=1e-5) for turn in apart.logprobs]
    assert (together.tokens, apart.tokens) == (69, 17 + 32 + 69)


def test_gradients_accumulate_until_they_are_cleared(decoder: Decoder) -> None:
    lora = trained_lora(decoder)
    once = [grad.clone() for grad in gradients(decoder, ragged(), lora)[0]]
    twice, _ = gradients(decoder, ragged(), lora)
    assert_equal(twice, [2 * grad for grad in once])


def changed(session: TrainingSequence, at: int) -> TrainingSequence:
    ids = list(session.ids)
    ids[at] = (ids[at] + 1) % VOCABULARY
    return dataclasses.replace(session, ids=ids)


def test_what_follows_the_last_span_changes_nothing(decoder: Decoder) -> None:
    session = sequence(random.Random(4), 40, (10, 20))
    expected, metrics = gradients(decoder, [session])
    for other in (changed(session, 20), dataclasses.replace(session, ids=session.ids[:20])):
        found, same = gradients(decoder, [other])
        assert all(a.equal(b) for a, b in zip(found, expected, strict=True))
        assert same == metrics


def test_a_prompt_token_is_read_but_not_learnt(decoder: Decoder) -> None:
    """Tokens between spans are context: they change the later span, never the earlier, and are no targets."""
    session = sequence(random.Random(5), 40, (10, 15), (30, 35))
    silent = [dataclasses.replace(span, advantages=[0.0] * 5, alternatives=None) for span in session.spans]
    _, before = gradients(decoder, [session])
    _, after = gradients(decoder, [changed(session, 20)])
    assert after.logprobs[0][0] == before.logprobs[0][0]
    assert after.logprobs[0][1] != before.logprobs[0][1]
    nothing, _ = gradients(decoder, [dataclasses.replace(session, spans=silent)])
    assert all((grad == 0).all() for grad in nothing)
    first_only = dataclasses.replace(session, spans=[session.spans[0], silent[1]])
    expected, _ = gradients(decoder, [first_only])
    found, _ = gradients(decoder, [changed(first_only, 20)])
    assert_equal(found, expected, 1e-6)


def test_scores_are_those_of_the_decoder_that_samples(decoder: Decoder) -> None:
    batch = ragged()
    trainer = Trainer(decoder, trained_lora(decoder), PolicyLoss(), micro_batch_tokens=50)
    policy, base = trainer.score(batch), trainer.score(batch, base=True)
    _, metrics = gradients(decoder, batch)
    for number, one in enumerate(batch):
        ids = torch.tensor(one.ids)
        with torch.no_grad():
            logits = decoder.logits(decoder.forward(ids, torch.arange(len(ids)), causal)).log_softmax(-1)
        for span, found in zip(one.spans, base[number], strict=True):
            expected = [logits[i - 1, ids[i]].item() for i in range(span.start, span.stop)]
            assert found == pytest.approx(expected, abs=1e-4)
        for own, trained in zip(policy[number], metrics.logprobs[number], strict=True):
            assert own == pytest.approx(trained, abs=1e-5)
    assert policy != base


def test_scoring_asks_for_no_signals_and_leaves_no_gradients(decoder: Decoder) -> None:
    lora = trained_lora(decoder)
    bare = TrainingSequence(list(range(20)), [Span(0, 5, 9, [], [])])
    (spans, nothing) = Trainer(decoder, lora, PolicyLoss()).score([bare, TrainingSequence([1, 2], [])])
    assert [len(span) for span in spans] == [4]
    assert nothing == []
    assert all(parameter.grad is None for parameter in lora.parameters())


def test_metrics_are_sums_over_the_response_tokens(decoder: Decoder) -> None:
    batch, loss = sampled_alone(ragged()), PolicyLoss(kl_coef=0.2)
    trainer = Trainer(decoder, trained_lora(decoder), loss, micro_batch_tokens=40)
    base = trainer.score(batch, base=True)
    metrics = trainer.forward_backward(batch)
    samples = sum(len(sequence.spans) for sequence in batch)
    assert samples == 7
    clipped = kl_base = mean = 0.0
    for one, news, bases in zip(batch, metrics.logprobs, base, strict=True):
        for span, new, reference in zip(one.spans, news, bases, strict=True):
            columns = (torch.tensor(c) for c in (new, span.old_logprobs, span.advantages, reference))
            tokens = loss.per_token(*columns)
            clipped, mean = clipped + tokens.clipped.sum().item(), mean + tokens.loss.mean().item() / samples
            kl_base += tokens.kl_base.sum().item()
    assert metrics.clipped == clipped > 0
    assert metrics.kl_base == pytest.approx(kl_base, rel=1e-4)
    assert metrics.loss == pytest.approx(mean, rel=1e-4)
    assert (metrics.response_tokens, metrics.tokens) == (49, 29 + 49 + 1 + 19 + 16)


def test_nothing_to_learn_is_nothing_learnt(decoder: Decoder) -> None:
    lora = trained_lora(decoder)
    metrics = Trainer(decoder, lora, PolicyLoss()).forward_backward([TrainingSequence([1, 2, 3], [])])
    assert metrics == PassResult(0, 0, 0, 0, 0, [[]])
    assert all(parameter.grad is None for parameter in lora.parameters())


def slope(value: Callable[[float], float], step: float) -> float:
    return (value(step) - value(-step)) / (2 * step)


@pytest.mark.parametrize("side", ["a", "b"])
def test_with_dropout_the_gradient_is_still_the_slope_of_the_loss(decoder: Decoder, side: str) -> None:
    """By one side's factors at a time: the other's slope would drown it."""
    lora = trained_lora(decoder, dropout=0.5)
    # Without the clip's corners, where there is no slope.
    batch, loss = sampled_alone(ragged()), PolicyLoss("importance_sampling")
    _, dropped = gradients(decoder, batch, lora, loss)
    assert dropped.loss != gradients(decoder, batch, trained_lora(decoder), loss)[1].loss
    factors: list[Tensor] = list(getattr(lora, side).values())
    generator = torch.Generator().manual_seed(9)
    directions = [torch.randn(factor.shape, generator=generator) for factor in factors]
    start, found = [f.detach().clone() for f in factors], [f.grad.clone() for f in factors if f.grad is not None]

    def moved(step: float) -> float:
        with torch.no_grad():
            for factor, at, direction in zip(factors, start, directions, strict=True):
                factor.copy_(at + step * direction)
        return Trainer(decoder, lora, loss).forward_backward(batch).loss

    expected = sum((grad * direction).sum().item() for grad, direction in zip(found, directions, strict=True))
    assert slope(moved, 1e-3) == pytest.approx(expected, rel=2e-2)


def test_a_few_steps_teach_what_the_advantages_say(decoder: Decoder) -> None:
    lora = LoraWeights.create(decoder.shape, rank=4, alpha=8)
    draw = random.Random(0)
    ids = [draw.randrange(VOCABULARY) for _ in range(40)]
    wanted, unwanted = [1.0] * 10, [-1.0] * 10
    bare = TrainingSequence(ids, [Span(0, 10, 20, [], []), Span(1, 30, 40, [], [])])
    trainer = Trainer(decoder, lora, PolicyLoss(eps_clip=10, eps_clip_high=10))
    ((good, bad),) = trainer.score([bare])
    batch = [TrainingSequence(ids, [Span(0, 10, 20, good, wanted), Span(1, 30, 40, bad, unwanted)])]
    optimiser = torch.optim.AdamW(lora.parameters(), lr=1e-2)
    for _ in range(5):
        optimiser.zero_grad()
        trainer.forward_backward(batch)
        optimiser.step()
    ((better, worse),) = trainer.score([bare])
    assert sum(better) > sum(good) + 1
    assert sum(worse) < sum(bad) - 1
