"""Records on disk that say where the service keeps a policy."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from openclaw_rl.models import ON_TINKER

POLICY, STATE = ON_TINKER, "learner.json"
SCHEME = "tinker://"


class BadRecord(ValueError):
    """The folder does not hold a policy on Tinker; the message says why."""


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """The paths of one policy version on the service."""

    base_model: str
    rank: int
    sampler: str | None
    """Weights to sample from; None if they have to be made from the state."""
    state: str | None
    """Weights with the optimiser's state, if they were saved."""

    def write(self, folder: Path) -> None:
        (folder / POLICY).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "PolicyRecord":
        """Raises BadRecord."""
        try:
            saved = json.loads((folder / POLICY).read_text())
            record = cls(str(saved["base_model"]), int(saved["rank"]), saved["sampler"], saved["state"])
        except FileNotFoundError:
            raise BadRecord(f"{folder} holds no policy of Tinker's ({POLICY} is missing)") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadRecord(f"{folder / POLICY} is damaged: {error!r}") from error
        paths = [path for path in (record.sampler, record.state) if path is not None]
        if not paths or not all(isinstance(path, str) and path.startswith(SCHEME) for path in paths):
            raise BadRecord(f"{folder / POLICY} is damaged: it names no {SCHEME} path")
        return record


@dataclass(frozen=True, slots=True)
class LearnerRecord:
    """The state to continue training from."""

    steps: int
    state: str

    def write(self, folder: Path) -> None:
        (folder / STATE).write_text(json.dumps(asdict(self), indent=1) + "\n")

    @classmethod
    def read(cls, folder: Path) -> "LearnerRecord":
        """Raises BadRecord."""
        try:
            saved = json.loads((folder / STATE).read_text())
            record = cls(int(saved["steps"]), str(saved["state"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadRecord(f"{folder / STATE} cannot be read: {error!r}") from error
        if not record.state.startswith(SCHEME):
            raise BadRecord(f"{folder / STATE} is damaged: it names no {SCHEME} path")
        return record
