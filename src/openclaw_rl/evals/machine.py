"""The model that a demo or an evaluation is about, and where it runs."""

from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.engines.factory import EngineSettings, SamplerFactory


@dataclass(frozen=True, slots=True)
class Machine:
    """What evaluations pass to the servers that they start, and to their own sampler."""

    model_name: str | None
    seed: int
    sampler: SamplerFactory
    settings: EngineSettings
    flags: tuple[str, ...] = ()
    """The given engine options, for servers."""
    typed: tuple[str, ...] = ()
    """The given server options, for the command that repeats a demo."""

    @property
    def cache(self) -> Path:
        return self.settings.cache
