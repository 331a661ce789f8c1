"""One model a run: what was captured and learned is in its tokens and for its weights, and nonsense for another."""

from pathlib import Path

from openclaw_rl.errors import UserError

#: In a run directory, or the directory of its ledger: the name of the model that it belongs to.
FILE = "model.txt"


class OtherModel(UserError):
    """The folder belongs to another model; the message says to which, and what to do."""


def keep_to_model(folder: Path, model: str) -> None:
    """Make a folder this model's, or see that it is. Raises OtherModel.

    A model is known by the last part of its name, so that it may be moved, or be downloaded.
    """
    name, path = Path(model).name or Path(model).resolve().name, folder / FILE
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    elif (known := path.read_text().strip()) != name:
        raise OtherModel(
            f"{folder} holds what {known} said and learned, in which {name} would find no sense. "
            f"Give another --run-dir, or the --model-name that it belongs to."
        )
