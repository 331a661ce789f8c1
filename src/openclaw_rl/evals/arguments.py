"""What `demo` and `eval` are asked for: the model and where it runs, methods and tasks.

Command lines are read with this module, so it imports nothing heavy.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from openclaw_rl.methods.options import BUILT_IN

if TYPE_CHECKING:
    from openclaw_rl.engines.factory import EngineSettings, SamplerFactory

#: Options of the server for which model runs where.
MODEL_OPTIONS = ("model_name", "trust_remote_code", "cache_dir", "device", "seed")
#: All built-in methods, in the order in which they are shown: the newest first.
METHODS = tuple(reversed(BUILT_IN))
#: The environment variable with the key of the model that plays the person.
USER_KEY = "OPENCLAW_DEMO_USER_API_KEY"
#: What `eval` measures. The last task needs another package.
TASKS = ("conversation", "coding", "tool-use", "bfcl")
#: The name of the untrained model.
BASE = "base"


@dataclass(frozen=True, slots=True)
class Machine:
    """What evaluations pass to the servers that they start, and to their own sampler."""

    model_name: str | None
    seed: int
    sampler: "SamplerFactory"
    policy_name: str
    """The model, whether or not it was named."""
    settings: "EngineSettings"
    flags: tuple[str, ...] = ()
    """The given engine options, for servers."""
    typed: tuple[str, ...] = ()
    """The given server options, for the command that repeats a demo."""

    @property
    def model_flags(self) -> tuple[str, ...]:
        """The options of a server that serves this model, if one is named."""
        return (*self.flags, *(("--model-name", self.model_name) if self.model_name else ()))

    def fetch_model(self) -> Path:
        """The folder with the files of the model that its sampler needs. Raises ModelNotFound."""
        from openclaw_rl.engines.factory import fetch

        return fetch(self.sampler.model_files, self.policy_name, self.settings.cache)
