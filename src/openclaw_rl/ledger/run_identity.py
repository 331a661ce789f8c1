"""One model per run: recorded tokens and learned weights mean nothing to another model."""

from pathlib import Path

from openclaw_rl.errors import UserError

#: In a run directory, or its ledger's: the name of the model that it belongs to.
FILE = "model.txt"


class OtherModel(UserError):
    """The folder belongs to another model; the message says to which, and what to do."""


def keep_to_model(folder: Path, model: str) -> None:
    """Assign a folder to a model, or check that it belongs to it. Raises OtherModel.

    Only the last part of the name counts, so that a model may be moved or downloaded.
    """
    name, path = Path(model).name or Path(model).resolve().name, folder / FILE
    try:
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{name}\n")
        known = path.read_text(errors="backslashreplace").strip()
    except OSError as error:
        raise OtherModel(f"{path} cannot be used ({error.strerror}). Mend it, or give another --run-dir.") from None
    if known != name:
        raise OtherModel(
            f"{folder} holds the conversations and weights of {known}, which {name} cannot read. "
            f"Give another --run-dir, or the --model-name that it belongs to."
        )
