"""Training settings for tests."""

from dataclasses import fields
from typing import Any

from openclaw_rl.types import LossSettings, TrainingSettings

USUAL = TrainingSettings(
    loss=LossSettings(),
    epochs=1,
    learning_rate=1e-3,
    betas=(0.9, 0.95),
    weight_decay=0.0,
    max_grad_norm=1.0,
    max_kl=0.5,
    seed=0,
)


def taken_out(given: dict[str, Any], usual: TrainingSettings = USUAL) -> TrainingSettings:
    """Training settings from the given values, which are removed from `given`; defaults for the rest."""
    values = {field.name: given.pop(field.name, getattr(usual, field.name)) for field in fields(usual)}
    return TrainingSettings(**values)
