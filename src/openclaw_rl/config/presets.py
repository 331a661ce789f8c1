"""Presets: values of several options that belong together. Each option can still be given."""

from collections.abc import Mapping
from typing import Any

PERSONAL = "personal"
#: What learned well from one person in docs/results: more of each answer and larger steps than by default, near the
#: base model, hints before scores, and notes.
PRESETS: Mapping[str, Mapping[str, Any]] = {
    PERSONAL: {
        "method": "notes+combine",
        "batch_size": 8,
        "learning_rate": 3e-4,
        "lora_rank": 16,
        "baseline": "batch",
        "kl_loss_coef": 0.02,
        "w_rl": 0.5,
        "w_notes": 0.5,
        "opd_clip": 3.0,
        "topk_adv_diff_clip": 3.0,
        "check_hints": True,
    },
}


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Given options, with those of their preset that were not given."""
    return {**PRESETS.get(values.get("preset", ""), {}), **values}


def describe_preset(preset: str) -> str:
    """Where the settings of learning come from, and how to get better ones."""
    if preset in PRESETS:
        return f"preset {preset} ('openclaw-rl serve --preset {preset} --dry-run' shows its values)"
    return f"the defaults; --preset {PERSONAL} has those that learned well from one person"
