"""Commands on a run directory."""

import json
from collections.abc import Callable
from typing import Any

#: Takes a command's arguments; returns exit status, output and errors.
Program = Callable[..., tuple[int, str, str]]


def status(program: Program) -> dict[str, Any]:
    code, out, err = program("status", "--json")
    assert (code, err) == (0, "")
    shown: dict[str, Any] = json.loads(out)
    return shown
