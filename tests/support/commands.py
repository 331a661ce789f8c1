"""Commands on a run directory, in this process: another one would spend a second on its imports."""

import contextlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from openclaw_rl.cli import main

#: Takes a command's arguments; returns exit status, output and errors.
Program = Callable[..., tuple[int, str, str]]


def run_command(run_dir: Path, *arguments: str) -> tuple[int, str, str]:
    """Run a command: exit status, output, errors."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main([*arguments, "--run-dir", str(run_dir)])
    return code, out.getvalue(), err.getvalue()


def status(program: Program) -> dict[str, Any]:
    code, out, err = program("status", "--json")
    assert (code, err) == (0, "")
    shown: dict[str, Any] = json.loads(out)
    return shown
