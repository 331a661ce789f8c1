"""The options of a run as a whole, and presets: values of several options that belong together."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from openclaw_rl.config.options import Section, option


class RunOptions(Section):
    """The folders, the seed and the log level of a run."""

    heading = "General"
    run_dir: Path = option(Path("runs/default"), "Folder for everything that this run writes.")
    cache_dir: Path = option(
        Path("~/.cache/openclaw-rl"), "Folder for downloaded and converted models.", env="OPENCLAW_RL_CACHE"
    )
    seed: int = option(0, "Seed of every random stream.", ge=0)
    preset: Literal["none", "personal", "team"] = option(
        "none",
        "Defaults of other options that belong together; personal: the settings that learned well from one person "
        "(docs/results/notes.md); team: the same, with a line of policies for each person (docs/teams.md).",
        shown="none: each option has its own default",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option("info", "Least severe messages to log.")

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.run_dir.expanduser()

    @property
    def cache(self) -> Path:
        """The folder of downloaded models."""
        return self.cache_dir.expanduser()


PERSONAL, TEAM = "personal", "team"
#: What learned well from one person in docs/results: more of each answer and larger steps than by default, near the
#: base model, hints before scores, and notes.
FROM_ONE_PERSON = {
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
    "practice": True,
}
PRESETS: Mapping[str, Mapping[str, Any]] = {
    PERSONAL: FROM_ONE_PERSON,
    TEAM: {**FROM_ONE_PERSON, "policy_per_user": True},
}


def with_preset(values: Mapping[str, Any]) -> dict[str, Any]:
    """Given options, with those of their preset that were not given."""
    return {**PRESETS.get(values.get("preset", ""), {}), **values}


def describe_preset(preset: str) -> str:
    """Where the settings of learning come from, and how to get better ones."""
    if preset in PRESETS:
        return f"preset {preset} ('openclaw-rl serve --preset {preset} --dry-run' shows its values)"
    return f"the defaults; --preset {PERSONAL} has those that learned well from one person"
