"""What the tests of commands share."""

from pathlib import Path

import pytest

from openclaw_rl.cli import main
from support.commands import Program


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The run directory; `book` is its ledger."""
    return tmp_path / "run"


@pytest.fixture
def program(folder: Path, capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs a command on the run directory: exit status, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*arguments, "--run-dir", str(folder)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run
