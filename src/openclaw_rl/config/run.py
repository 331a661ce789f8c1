"""The options of a run as a whole."""

from pathlib import Path
from typing import Literal

from openclaw_rl.config.options import Section, option


class RunOptions(Section):
    """The folders, the seed and the log level of a run."""

    run_dir: Path = option(
        Path("runs/default"), "Folder for everything that this run writes.", group="General", env="RUN_DIR"
    )
    cache_dir: Path = option(
        Path("~/.cache/openclaw-rl"),
        "Folder for downloaded and converted models.",
        group="General",
        env="OPENCLAW_RL_CACHE",
    )
    seed: int = option(0, "Seed of every random stream.", group="General", env="SEED", ge=0)
    preset: Literal["none", "personal"] = option(
        "none",
        "Defaults of other options that belong together; personal: the settings that learned well from one person "
        "(docs/results/notes.md).",
        group="General",
        env="PRESET",
        shown="none: each option has its own default",
    )
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "Least severe messages to log.", group="General", env="LOG_LEVEL"
    )

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.run_dir.expanduser()

    @property
    def cache(self) -> Path:
        """The folder of downloaded models."""
        return self.cache_dir.expanduser()
