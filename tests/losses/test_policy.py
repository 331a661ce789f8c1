"""Policy losses against their definitions in plain Python, and against finite differences."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from openclaw_rl.losses.policy import LossKind, PolicyLoss, k3, token_weight

KINDS: tuple[LossKind, ...] = ("ppo", "importance_sampling", "cispo")

logprob = st.floats(-60, 0)
advantage = st.one_of(st.just(0.0), st.floats(-5, 5))
token = st.tuples(logprob, logprob, advantage, logprob)
tokens = st.lists(token, min_size=1, max_size=12)


def tensors(rows: list[tuple[float, ...]]) -> tuple[Tensor, ...]:
    return tuple(torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True))


def reference(loss: PolicyLoss, new: float, old: float, advantage: float, base: float) -> tuple[float, float]:
    """(loss, derivative by the new log-prob) of one token, written out case by case."""
    gap = min(max(new - old, -20.0), 20.0)
    ratio, moves = math.exp(gap), abs(new - old) <= 20
    if loss.kind == "importance_sampling":
        value, slope = -advantage * ratio, -advantage * ratio * moves
    elif loss.kind == "cispo":
        weight = min(ratio, 1 + loss.eps_clip_high)
        value, slope = -advantage * weight * new, -advantage * weight
    else:
        bounded = min(max(ratio, 1 - loss.eps_clip), 1 + loss.eps_clip_high)
        value = max(-advantage * ratio, -advantage * bounded)
        held = -advantage * bounded > -advantage * ratio
        slope = 0.0 if held else -advantage * ratio * moves
    back = min(max(base - new, -20.0), 20.0)
    value += loss.kl_coef * (math.exp(back) - 1 - back)
    slope += loss.kl_coef * (1 - math.exp(back)) * (abs(base - new) <= 20)
    return value, slope


@pytest.mark.parametrize("kind", KINDS)
@given(rows=tokens, kl_coef=st.sampled_from([0.0, 0.3]))
def test_losses_and_slopes_are_their_definitions(kind: LossKind, rows: Any, kl_coef: float) -> None:
    loss = PolicyLoss(kind, eps_clip=0.2, eps_clip_high=0.28, kl_coef=kl_coef)
    new, old, advantages, base = tensors(rows)
    new.requires_grad_()
    found = loss.per_token(new, old, advantages, base)
    expected = [reference(loss, *row) for row in rows]
    found.loss.sum().backward()
    torch.testing.assert_close(found.loss.detach(), torch.tensor([value for value, _ in expected]).double())
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([slope for _, slope in expected]).double())


@pytest.mark.parametrize("kind", ["ppo", "importance_sampling"])
def test_slopes_are_finite_differences(kind: LossKind) -> None:
    torch.manual_seed(0)
    new = -torch.rand(200, dtype=torch.float64) * 3
    old = new + torch.randn(200, dtype=torch.float64)
    advantages, base = torch.randn(200, dtype=torch.float64), new + torch.randn(200, dtype=torch.float64)
    loss = PolicyLoss(kind, kl_coef=0.1)
    assert torch.autograd.gradcheck(lambda x: loss.per_token(x, old, advantages, base).loss, new.requires_grad_())


@pytest.mark.parametrize("kind", KINDS)
@given(rows=tokens)
def test_a_token_without_advantage_has_no_gradient_and_whatever_else_is_finite(kind: LossKind, rows: Any) -> None:
    new, old, advantages, _base = (column.float() for column in tensors(rows))
    new.requires_grad_()
    found = PolicyLoss(kind).per_token(new, old, advantages)
    found.loss.sum().backward()
    assert new.grad is not None
    assert (new.grad[advantages == 0] == 0).all()
    for column in (found.loss, new.grad):
        assert column.isfinite().all()
    assert found.kl_base.eq(0).all()


@given(rows=tokens)
def test_statistics_are_those_of_the_tokens(rows: Any) -> None:
    new, old, advantages, base = tensors(rows)
    found = PolicyLoss("ppo").per_token(new, old, advantages, base)
    ratio = (new - old).clamp(-20, 20).exp()
    outward = ((advantages > 0) & (ratio > 1.28)) | ((advantages < 0) & (ratio < 0.8))
    assert found.clipped.bool().equal(outward)
    torch.testing.assert_close(found.kl_base, k3(new, base))


def test_cispo_clips_from_above_only_and_importance_sampling_never() -> None:
    new, old, advantages = torch.tensor([0.0, -3.0]), torch.tensor([-3.0, 0.0]), torch.tensor([1.0, 1.0])
    assert PolicyLoss("cispo").per_token(new, old, advantages).clipped.tolist() == [1, 0]
    assert PolicyLoss("importance_sampling").per_token(new, old, advantages).clipped.tolist() == [0, 0]


def test_k3_is_an_unbiased_estimate_of_the_divergence() -> None:
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 30, dtype=torch.float64).log_softmax(-1)
    expected = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((policy.exp() * k3(policy, reference)).sum(), expected)


def test_a_divergence_to_weigh_needs_base_logprobs() -> None:
    with pytest.raises(ValueError, match="base"):
        PolicyLoss(kl_coef=0.1).per_token(torch.zeros(1), torch.zeros(1), torch.zeros(1))


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_weights_are_the_mean_over_samples_of_the_mean_over_tokens(lengths: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    losses = [torch.randn(length, generator=generator, dtype=torch.float64) for length in lengths]
    weighted = sum(token_weight(len(sample), len(losses)) * sample.sum() for sample in losses)
    torch.testing.assert_close(weighted, torch.stack([sample.mean() for sample in losses]).mean())


@given(rows=st.lists(tokens, min_size=1, max_size=4))
def test_alternatives_have_the_clipped_loss_one_by_one_whatever_the_kind(rows: Any) -> None:
    width = min(map(len, rows))
    table = [row[:width] for row in rows]
    new, old, advantages = (
        torch.tensor([[cell[column] for cell in row] for row in table], dtype=torch.float64) for column in range(3)
    )
    expected = [sum(reference(PolicyLoss(), *cell[:3], cell[0])[0] for cell in row) for row in table]
    for kind in KINDS:
        found = PolicyLoss(kind).over_alternatives(new, old, advantages)
        torch.testing.assert_close(found, torch.tensor(expected).double())


def test_slopes_over_alternatives_are_finite_differences() -> None:
    torch.manual_seed(0)
    new = -torch.rand(40, 5, dtype=torch.float64) * 3
    old, advantages = new + torch.randn(40, 5, dtype=torch.float64), torch.randn(40, 5, dtype=torch.float64)
    advantages[:, 3:] = 0.0
    loss = PolicyLoss()
    assert torch.autograd.gradcheck(lambda x: loss.over_alternatives(x, old, advantages), new.requires_grad_())
