"""Where a policy's weights are and in which form: a learner writes them, a sampler loads them."""

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from openclaw_rl.engines.errors import EngineUnavailable
from openclaw_rl.models import ADAPTER_CONFIG, ON_TINKER


class WeightForm(StrEnum):
    """The form in which a learner hands the weights of a policy to a sampler."""

    PEFT = "a PEFT adapter"
    MODEL = "a model with all its weights"
    REMOTE = "a reference to weights on Tinker"


#: The file by which each form is recognised; a model folder has none of the files before it.
MARKERS = {ON_TINKER: WeightForm.REMOTE, ADAPTER_CONFIG: WeightForm.PEFT, "config.json": WeightForm.MODEL}


@dataclass(frozen=True, slots=True)
class PolicyRef:
    """One policy's weights. Only engines look into the folder."""

    form: WeightForm
    folder: Path


def policy_in(folder: Path) -> PolicyRef:
    """The policy in a folder on disk. Raises EngineUnavailable if there is none."""
    for name, form in MARKERS.items():
        if (folder / name).is_file():
            return PolicyRef(form, folder)
    raise EngineUnavailable(
        f"{folder} holds no policy: it has none of {', '.join(MARKERS)}. "
        "Give another --resume-from-ckpt, or none to start from the base model."
    )
