"""The simulation of users, samplers, a judge and a learner, and the model of a step's time."""

import importlib
import sys
from dataclasses import replace

import pytest

from support.server_program import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
fleet = importlib.import_module("fleet")
model = importlib.import_module("scale_model")

SMALL = fleet.Fleet(users=40, minutes=5, batch_size=4)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("given", [{}, {"samplers": 3}, {"places": 2}, {"judges": 1}, {"publish_seconds": 60.0}])
def test_every_turn_is_somewhere_after_every_event(seed: int, given: dict[str, float]) -> None:
    run = fleet.Simulation(replace(SMALL, seed=seed, minutes=2, **given))
    while run.now < 120:
        run.step()
        held = sum(sampler.load for sampler in run.samplers)
        places = [turn.place for turn in run.turns]
        assert held == sum(place in (fleet.Place.QUEUED, fleet.Place.ANSWERED) for place in places)
        # Each user has at most one turn that is not done.
        assert held + places.count(fleet.Place.AWAITING) <= run.fleet.users
    outcome = fleet.simulate(run.fleet)
    assert sum(outcome.places.values()) == outcome.asked == sum(outcome.turns_a_sampler)
    assert outcome.places[fleet.Place.APPLIED] == outcome.steps * run.fleet.batch_size


def test_the_same_seed_gives_the_same_numbers_and_another_one_others() -> None:
    assert fleet.simulate(SMALL) == fleet.simulate(SMALL)
    assert fleet.simulate(SMALL) != fleet.simulate(replace(SMALL, seed=1))


@pytest.mark.parametrize("seed", range(3))
def test_more_samplers_never_lengthen_the_queue(seed: int) -> None:
    crowded = replace(SMALL, users=200, places=4, seed=seed, minutes=3)
    waits = [fleet.simulate(replace(crowded, samplers=count)).mean_wait for count in (1, 2, 4, 8)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 1
    assert waits[-1] < 0.1


def test_a_lone_user_waits_for_nobody_and_gets_tokens_at_the_pace_of_one_sequence() -> None:
    alone = replace(SMALL, users=1, think_seconds=1.0)
    outcome = fleet.simulate(alone)
    assert outcome.longest_wait == 0
    seconds = 200 * (alone.step_ms + alone.step_ms_per_sequence) / 1000 + 300 / alone.prefill_rate
    assert outcome.answers_a_minute == pytest.approx(60 / (seconds + 1), rel=0.15)


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"users": 400, "places": 4}, "samplers"),
        ({"users": 100, "judges": 1, "judge_seconds": 5.0}, "judge"),
        ({"users": 200, "batch_size": 1, "publish_seconds": 5.0}, "learner"),
        ({"users": 10}, "users"),
    ],
)
def test_the_part_that_is_too_slow_is_named(given: dict[str, float], part: str) -> None:
    assert fleet.simulate(replace(SMALL, **given)).bottleneck == part


def test_a_slow_learner_makes_turns_stale_and_drops_the_oldest() -> None:
    slow = fleet.simulate(replace(SMALL, users=200, batch_size=2, publish_seconds=3.0, max_staleness=2))
    quick = fleet.simulate(replace(SMALL, users=200, batch_size=2, publish_seconds=0.0, max_staleness=2))
    assert slow.places[fleet.Place.STALE] > 0
    assert slow.max_staleness <= 2
    assert quick.samples_a_minute > slow.samples_a_minute


def test_the_step_model_repeats_what_was_measured_on_one_gpu() -> None:
    one = model.step_time(model.QWEN3_4B, 1, 8 * 576, full=False, sharded=False, micro_batch=8 * 576)
    assert one.seconds == pytest.approx(0.259, rel=0.02)
    sixteen = model.step_time(model.QWEN3_4B, 1, 16 * 1024, full=False, sharded=False)
    assert 16 * 1024 / sixteen.seconds == pytest.approx(26_400, rel=0.02)
    assert one.communication == 0


def test_more_gpus_than_micro_batches_do_not_help() -> None:
    def seconds(gpus: int) -> float:
        return float(model.step_time(model.QWEN3_4B, gpus, 4 * 4096, full=False, sharded=False).seconds)

    assert seconds(4) < seconds(2) < seconds(1)
    assert seconds(8) >= seconds(4)


def test_sharding_divides_the_memory_of_weights() -> None:
    whole = model.memory(model.QWEN3_4B, 8, full=True, sharded=False)
    assert model.memory(model.QWEN3_4B, 8, full=True, sharded=True) == pytest.approx(whole / 8)
