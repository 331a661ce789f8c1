"""Where a view of a run reads from."""

from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.engines.factory import EngineSettings
from openclaw_rl.learn.checkpoints import Checkpoints
from openclaw_rl.methods.base import Method


@dataclass(frozen=True, slots=True)
class RunSource:
    """A run's files, its method, and the engine that can answer with its policies."""

    run_dir: Path
    ledger_dir: Path
    checkpoints: Checkpoints
    model_name: str | None
    method: Method
    settings: EngineSettings
