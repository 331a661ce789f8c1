"""A run belongs to one model."""

from collections.abc import Callable
from pathlib import Path

import pytest

from openclaw_rl.ledger.run_dir import MODEL_FILE, OtherModel, keep_to_model


def test_a_folder_belongs_to_the_first_model_that_uses_it(tmp_path: Path) -> None:
    keep_to_model(tmp_path / "run", "someone/small-model")
    keep_to_model(tmp_path / "run", "someone/small-model")
    # Downloaded and put elsewhere, it is the same.
    keep_to_model(tmp_path / "run", "/models/small-model/")
    with pytest.raises(OtherModel, match=r"weights of small-model, which other-model cannot read.*--run-dir"):
        keep_to_model(tmp_path / "run", "someone/other-model")


@pytest.mark.parametrize(
    "damage", [Path.mkdir, lambda path: path.symlink_to(path)], ids=["a folder", "a link to itself"]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    damage(tmp_path / MODEL_FILE)
    with pytest.raises(OtherModel, match=r"model\.txt cannot be used.*--run-dir"):
        keep_to_model(tmp_path, "small-model")


def test_a_file_of_other_bytes_names_no_model(tmp_path: Path) -> None:
    (tmp_path / MODEL_FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(OtherModel, match="which small-model cannot read"):
        keep_to_model(tmp_path, "small-model")
