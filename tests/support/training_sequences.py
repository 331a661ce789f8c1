"""Random training sequences with alternatives, and the loss of the alternatives computed one by one."""

import dataclasses
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openclaw_rl.losses.policy import PolicyLoss
from openclaw_rl.types import Alternatives, Span, TrainingSequence

VOCABULARY = 200


def alternatives(draw: random.Random, count: int) -> Alternatives | None:
    """Up to three alternatives for each token of a span, some with advantage 0; for some spans none at all."""
    width = draw.randrange(4)
    if not width:
        return None

    def numbers(low: float, high: float) -> Any:
        return np.array([[draw.uniform(low, high) for _ in range(width)] for _ in range(count)], dtype=np.float32)

    ids = np.array([draw.sample(range(VOCABULARY), width) for _ in range(count)], dtype=np.int32)
    advantages = numbers(-1, 1)
    advantages[advantages > 0.7] = 0.0
    return Alternatives(ids, numbers(-7, -4), advantages)


def sequence(draw: random.Random, length: int, *bounds: tuple[int, int]) -> TrainingSequence:
    """Random tokens; old log-probs near those of a random model, so that some ratios are clipped and some are not."""
    spans = [
        Span(
            number,
            start,
            stop,
            [draw.uniform(-7, -4) for _ in range(start, stop)],
            [draw.uniform(-2, 2) for _ in range(start, stop)],
            alternatives(random.Random(f"{length} {start} {stop}"), stop - start),
        )
        for number, (start, stop) in enumerate(bounds)
    ]
    return TrainingSequence([draw.randrange(VOCABULARY) for _ in range(length)], spans)


def ragged(seed: int = 0) -> list[TrainingSequence]:
    """Five sequences of different lengths with one to three spans."""
    draw = random.Random(seed)
    return [
        sequence(draw, 30, (20, 30)),
        sequence(draw, 50, (5, 9), (12, 30), (45, 50)),
        sequence(draw, 9, (1, 2)),
        sequence(draw, 24, (10, 20)),
        sequence(draw, 17, (16, 17)),
    ]


def relatives(seed: int = 0) -> list[TrainingSequence]:
    """Sequences that begin alike, not sorted: attempts at a prompt, two of them equal and two that part late, episodes
    that share a first turn, a turn that another one extends, and a stranger."""
    draw = random.Random(seed)

    def tokens(count: int) -> list[int]:
        # Not 0: in Transformers the embedding of a padding token has no gradient.
        return [draw.randrange(1, VOCABULARY) for _ in range(count)]

    def learning(ids: list[int], *bounds: tuple[int, int]) -> TrainingSequence:
        return dataclasses.replace(sequence(draw, len(ids), *bounds), ids=ids)

    prompt, first, opening = tokens(70), tokens(9), tokens(3)
    turn = [*prompt, *first, *tokens(60)]
    answer = [*prompt, *tokens(12)]
    return [
        learning([*prompt, *opening, *tokens(8)], (70, 81)),
        learning(answer, (70, 82)),
        learning([*turn, *tokens(5)], (70, 79), (139, 144)),
        learning(tokens(20), (5, 20)),
        learning([*prompt, *opening, *tokens(2)], (70, 75)),
        learning([*turn, *tokens(7)], (70, 79), (139, 146)),
        learning(answer, (70, 82)),
        learning([*answer, *tokens(80)], (90, 95), (150, 162)),
    ]


def over_alternatives(scores: Tensor, span: Span, loss: PolicyLoss) -> Tensor:
    """The sum of the clipped losses of a span's alternatives."""
    total = torch.zeros((), dtype=scores.dtype)
    if (others := span.alternatives) is None:
        return total
    rows = zip(others.ids.tolist(), others.old_logprobs.tolist(), others.advantages.tolist(), strict=True)
    for i, row in enumerate(rows):
        for token, old, advantage in zip(*row, strict=True):
            ratio = (scores[span.start - 1 + i, token] - old).exp()
            bounded = ratio.clamp(1 - loss.eps_clip, 1 + loss.eps_clip_high)
            total = total + torch.maximum(-advantage * ratio, -advantage * bounded)
    return total
