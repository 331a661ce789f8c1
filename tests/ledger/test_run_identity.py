"""A run belongs to one model."""

from pathlib import Path

import pytest

from openclaw_rl.ledger.run_identity import OtherModel, keep_to_model


def test_a_folder_belongs_to_the_first_model_that_uses_it(tmp_path: Path) -> None:
    keep_to_model(tmp_path / "run", "someone/small-model")
    keep_to_model(tmp_path / "run", "someone/small-model")
    # Downloaded and put elsewhere, it is the same.
    keep_to_model(tmp_path / "run", "/models/small-model/")
    with pytest.raises(OtherModel, match=r"weights of small-model, which other-model cannot read.*--run-dir"):
        keep_to_model(tmp_path / "run", "someone/other-model")
