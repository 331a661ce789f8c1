"""The options of a run as a whole."""

from pathlib import Path
from typing import Literal

from openclaw_rl.config.options import Section, option


class RunOptions(Section):
    """Where a run keeps its files, its seed, how much it logs."""

    run_dir: Path = option(Path("runs/default"), "Where this run keeps what it learns.", group="General", env="RUN_DIR")
    cache_dir: Path = option(
        Path("~/.cache/openclaw-rl"),
        "Where fetched and converted models are kept.",
        group="General",
        env="OPENCLAW_RL_CACHE",
    )
    seed: int = option(0, "Start of every random stream.", group="General", env="SEED", ge=0)
    log_level: Literal["debug", "info", "warning", "error"] = option(
        "info", "How much to log.", group="General", env="LOG_LEVEL"
    )

    @property
    def folder(self) -> Path:
        """The run directory."""
        return self.run_dir.expanduser()

    @property
    def cache(self) -> Path:
        """The folder of fetched models."""
        return self.cache_dir.expanduser()
