"""Which tasks the environment `swe` has: generated ones, or those of a file in the format of SWE-bench."""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import Environment
from openclaw_rl.envs.swe.bench import SweBench
from openclaw_rl.envs.swe.environment import PlantedBugs
from openclaw_rl.envs.swe.instances import read_instances
from openclaw_rl.envs.swe.pytest_suite import Interpreter
from openclaw_rl.envs.swe.suites import PLAIN_PYTHON, check_python
from openclaw_rl.sandbox.kinds import CONTAINERS, choose_sandbox

#: The variable that names the folder of instances.
PATH_VARIABLE = "SWE_BENCH_PATH"
#: The image in which generated tasks are tested, with docker or podman.
PYTHON_IMAGE = "python:3.12-slim"
#: How the tests of instances are run: by pytest, or by our own runner of plain asserts.
RUNNERS = ("pytest", "plain")
#: Seconds for one run of pytest: a call of the environment may take 120 by default.
PYTEST_SECONDS = 100.0


def make_swe(
    levels: int | Sequence[int] | None = None,
    kinds: str | Sequence[str] | None = None,
    examples: int | None = None,
    path: str | Path | None = None,
    python: str | None = None,
    runner: str | None = None,
    seconds: float | None = None,
    sandbox: str = "auto",
    unsafe_no_sandbox: bool = False,
) -> Environment:
    """The environment of the given settings. Raises ConfigError."""
    generated: dict[str, Any] = _given(levels=levels, kinds=kinds, examples=examples)
    of_instances: dict[str, Any] = _given(python=python, runner=runner, seconds=seconds)
    if path is None and not (generated and not of_instances):
        path = os.environ.get(PATH_VARIABLE) or None
    if path is None:
        if of_instances:
            raise ConfigError(f"{next(iter(of_instances))} is for instances of SWE-bench; name their folder with path.")
        chosen = choose_sandbox(sandbox, unsafe_no_sandbox, PYTHON_IMAGE)
        environment = PlantedBugs(chosen, **generated)
        check_python(chosen, [*PLAIN_PYTHON, "import json"])
        return environment
    if generated:
        raise ConfigError(f"{next(iter(generated))} is for generated tasks; with path, tasks are in a file.")
    return _make_bench(Path(path).expanduser(), sandbox, unsafe_no_sandbox, **of_instances)


def _make_bench(
    path: Path,
    sandbox: str,
    unsafe_no_sandbox: bool,
    python: str = "python3",
    runner: str = "pytest",
    seconds: float = PYTEST_SECONDS,
) -> SweBench:
    if runner not in RUNNERS:
        raise ConfigError(f"swe has no runner {runner}; there are {' and '.join(RUNNERS)}.")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigError(f"seconds of swe must be a number above 0, not {seconds!r}.")
    instances = read_instances(path)
    if sandbox in CONTAINERS:
        chosen = choose_sandbox(sandbox, image=instances[0].image)
        return SweBench(chosen, path, instances, runner, Interpreter(), seconds)
    chosen = choose_sandbox(sandbox, unsafe_no_sandbox)
    # A virtual environment's Python is a link, and its packages are beside it.
    interpreter = Interpreter(python, [Path(python).parents[1]] if os.path.isabs(python) else [])
    environment = SweBench(chosen, path, instances, runner, interpreter, seconds)
    trial = interpreter.argv("-c", "import pytest") if runner == "pytest" else [*PLAIN_PYTHON, "import json"]
    check_python(chosen, trial, interpreter.readable)
    return environment


def _given(**settings: Any) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if value is not None}
