"""The model that a demo or an evaluation is about, and where it runs."""

from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.engines.factory import EngineSettings, SamplerFactory


@dataclass(frozen=True, slots=True)
class Machine:
    """What evaluations hand on to the servers that they start, and to a sampler of their own."""

    model_name: str | None
    seed: int
    sampler: SamplerFactory
    settings: EngineSettings
    flags: tuple[str, ...] = ()
    """The options of the engine that were given, for servers."""
    typed: tuple[str, ...] = ()
    """The options of the server among what was typed, to be typed again."""

    @property
    def cache(self) -> Path:
        return self.settings.cache
