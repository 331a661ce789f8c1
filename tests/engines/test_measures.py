"""How far a step moved the policy: exact for small moves, and never a matter of a few improbable tokens."""

import math
import random

import pytest

from openclaw_rl.engines.base import StepRefused
from openclaw_rl.engines.transaction import check_move, distance

#: The default of --max-kl.
LIMIT = 0.5


def moved(*log_ratios: float, before: float = -3.0) -> float:
    """The distance between two policies whose log-probs of some tokens differ by so much."""
    return distance([[[before] * len(log_ratios)]], [[[before + ratio for ratio in log_ratios]]])


@pytest.mark.parametrize("ratio", [0.01, -0.01, 0.1, -0.1])
def test_a_small_move_counts_half_its_square(ratio: float) -> None:
    assert moved(ratio) == pytest.approx(ratio * ratio / 2, rel=abs(ratio) / 2)


@pytest.mark.parametrize("ratio", [-0.5, -2.0, -8.0])
def test_tokens_that_became_less_likely_count_as_the_old_policys_samples(ratio: float) -> None:
    assert moved(ratio) == pytest.approx(math.exp(ratio) - 1 - ratio)


def test_it_is_the_same_either_way_and_the_mean_over_tokens() -> None:
    one, other = [[[-1.0, -2.0]], [[-0.5]]], [[[-1.5, -0.5]], [[-0.5]]]
    assert distance(one, other) == distance(other, one)
    assert distance(one, other) == pytest.approx((moved(-0.5) + moved(1.5) + 0) / 3)
    assert distance([], []) == 0


def test_sampled_tokens_tell_the_divergence_of_a_small_move() -> None:
    draw = random.Random(0)
    old = [0.6, 0.3, 0.08, 0.02]
    new = [0.55, 0.33, 0.1, 0.02]
    tokens = draw.choices(range(4), old, k=20_000)
    pairs = [[[math.log(policy[token]) for token in tokens]] for policy in (old, new)]
    exact = sum(p * math.log(p / q) for p, q in zip(old, new, strict=True))
    assert distance([pairs[0]], [pairs[1]]) == pytest.approx(exact, rel=0.1)


def test_a_few_improbable_tokens_that_became_likelier_refuse_no_step() -> None:
    """An imported answer has them; a thousandth that becomes a twentieth is no policy that ran away."""
    check_move(moved(*[0.1] * 18, 4.0, 4.0, before=-7.0), LIMIT)


@pytest.mark.parametrize("ratio", [2.0, -2.0, 9.0, -9.0])
def test_many_tokens_that_moved_far_refuse_the_step(ratio: float) -> None:
    with pytest.raises(StepRefused, match="--max-kl"):
        check_move(moved(*[ratio] * 10), LIMIT)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_a_policy_of_which_nobody_knows_where_it_is_is_refused(number: float) -> None:
    with pytest.raises(StepRefused):
        check_move(moved(number), LIMIT)
