"""The model that a demo or an evaluation is about, and where it runs."""

from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.engines.factory import EngineSettings, SamplerFactory, fetch


@dataclass(frozen=True, slots=True)
class Machine:
    """What evaluations pass to the servers that they start, and to their own sampler."""

    model_name: str | None
    seed: int
    sampler: SamplerFactory
    policy_name: str
    """The model, whether or not it was named."""
    settings: EngineSettings
    flags: tuple[str, ...] = ()
    """The given engine options, for servers."""
    typed: tuple[str, ...] = ()
    """The given server options, for the command that repeats a demo."""

    def fetch_model(self) -> Path:
        """The folder with the files of the model that its sampler needs. Raises ModelNotFound."""
        return fetch(self.sampler.model_files, self.policy_name, self.settings.cache)
