"""Learners on the double of Tinker, what they train on, and the states that they save there."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

from openclaw_rl.engines.tinker.connection import Account, Connection
from openclaw_rl.engines.tinker.learner import TinkerLearner
from openclaw_rl.engines.tinker.sampler import SamplerOptions, TinkerSampler
from openclaw_rl.engines.tinker.training_run import TrainingRunOptions
from openclaw_rl.types import Span, TrainingSequence
from support.tinker_double import RANK, Cloud
from support.training_settings import USUAL, taken_out


def options(**given: Any) -> TrainingRunOptions:
    training = taken_out(given, dataclasses.replace(USUAL, seed=3))
    return TrainingRunOptions(**{"rank": RANK, "train_attn": True, "train_mlp": True, "training": training, **given})


async def connected(model: Path, *, policies: int = 3, lines: bool = False, **given: Any) -> TinkerLearner:
    """A learner that holds no policy yet, with its sampler, which is started."""
    connection = Connection(Account(None, "tml-key", timeout=60.0))
    connection.first_pause = 0.01
    sampler = TinkerSampler(connection, SamplerOptions("tiny/model", model, None, 4, 4, 8, policies, lines))
    await sampler.start()
    learner = TinkerLearner(connection, sampler, options(**given))
    learner.retry_pause = 0.01
    await learner.start()
    return learner


async def a_learner(model: Path, **given: Any) -> TinkerLearner:
    learner = await connected(model, **given)
    await learner.reset()
    return learner


def batch(cloud: Cloud, seed: int = 0, count: int = 3, shift: float = 0.0) -> list[TrainingSequence]:
    """Sequences of several spans, sampled by the base model as it were; `shift` makes the old log-probs stale."""
    draw, found = random.Random(seed), []
    for number in range(count):
        ids = [draw.randrange(200) for _ in range(draw.randint(12, 30))]
        middle = draw.randint(4, 8)
        ends = [(2, middle), (middle + 2, len(ids) - draw.randint(0, 2))]
        logprobs = cloud.scores(ids, len(ids) - 1, 0).logprobs
        spans = [
            Span(
                10 * number + i,
                start,
                stop,
                [value + shift * draw.uniform(-1, 1) for value in logprobs[start - 1 : stop - 1]],
                [draw.uniform(-2, 2) for _ in range(stop - start)],
            )
            for i, (start, stop) in enumerate(ends)
        ]
        found.append(TrainingSequence(ids, spans))
    return found


def saved(cloud: Cloud, folder: Path) -> Any:
    """The steps, weights and optimiser's state that a checkpoint refers to, in a form that can be compared."""
    record = json.loads((folder / "learner.json").read_text())
    state = cloud.states[record["state"]]
    moments = state["optimizer"]["state"].values()
    numbers = [{name: value.tolist() for name, value in one.items()} for one in moments]
    return record["steps"], [weight.tolist() for weight in state["weights"]], numbers
