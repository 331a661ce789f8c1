"""How often the learner's state is saved for recovery."""

import random

import pytest

from openclaw_rl.learn.lineage import MAX_SHARE, Budget


@pytest.mark.parametrize("cost", [0.001, 0.3, 5.0, 400.0])
def test_saving_takes_at_most_its_share_of_the_training_time(cost: float) -> None:
    draw = random.Random(1)
    budget = Budget()
    trained = saved = since = worst = 0.0
    for step in range(2000):
        seconds = draw.uniform(1, 30)
        budget.add_time(seconds)
        trained, since = trained + seconds, since + seconds
        if budget.is_due:
            spent = draw.uniform(0.5, 1.5) * cost
            budget.add_cost(spent)
            saved, worst, since = saved + spent, max(worst, since), 0.0
        assert step > 0 or saved > 0, "the first step is saved, because nobody knows yet what a save costs"
    assert saved <= MAX_SHARE * trained * 1.6 + 1.5 * cost
    # A crash costs at most so much training, and never less than the step that was being made.
    assert worst <= 1.5 * cost / MAX_SHARE + 30


def test_a_cheap_save_is_made_after_every_step_and_none_without_a_share() -> None:
    budget, never = Budget(), Budget(share=0.0)
    for _ in range(5):
        budget.add_time(10.0)
        never.add_time(10.0)
        assert budget.is_due
        assert not never.is_due
        budget.add_cost(0.4)
