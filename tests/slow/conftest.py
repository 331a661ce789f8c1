"""What the slow suites share."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Where temporary folders are made, so that those of other programs do not count.

    It is none of pytest's: each start of pytest closes those to other users, also to the user of the sandbox.
    """
    made = tempfile.mkdtemp(prefix="openclaw-soak-")
    Path(made).chmod(0o755)
    monkeypatch.setattr(tempfile, "tempdir", made)
    yield made
    shutil.rmtree(made)
