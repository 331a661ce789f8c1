"""What the tests of commands share."""

import functools
from pathlib import Path

import pytest

from support.commands import Program, run_command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run directory; `book` is its ledger."""
    return tmp_path / "run"


@pytest.fixture
def program(folder: Path) -> Program:
    """Runs a command on the run directory: exit status, output, errors."""
    return functools.partial(run_command, folder)
