"""Reads the data of the package `bfcl-eval` (Berkeley Function Calling Leaderboard).

The package is located and not imported, because an import would need everything that it requires.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

from openclaw_rl.config.options import ConfigError

PACKAGE = "bfcl_eval"
#: `--no-deps`, because its requirements pin old versions of packages that this project needs.
MISSING = "BFCL needs the package bfcl-eval: pip install --no-deps bfcl-eval"
#: The package's names of types → JSON schema's.
TYPES = {"dict": "object", "float": "number", "tuple": "array"}


def find_data(*patterns: str) -> Path:
    """The first file or folder in the package's data that a pattern matches. Raises ConfigError."""
    spec = importlib.util.find_spec(PACKAGE)
    folders = [Path(place) / "data" for place in (spec.submodule_search_locations or ())] if spec else []
    found = [path for pattern in patterns for folder in folders for path in sorted(folder.glob(pattern))]
    if not found:
        raise ConfigError(MISSING)
    return found[0]


def read_with_answers(file: Path) -> list[dict[str, Any]]:
    """The entries of a file with their reference answers. Raises OSError, ValueError and KeyError."""
    answers = {
        entry["id"]: entry["ground_truth"] for entry in read_entries(file.parent / "possible_answer" / file.name)
    }
    return [{**entry, "ground_truth": answers[entry["id"]]} for entry in read_entries(file)]


def read_entries(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text("utf-8").splitlines() if line.strip()]


def json_schema(given: Any) -> Any:
    """BFCL's description of parameters as a JSON schema."""
    if isinstance(given, list):
        return [json_schema(item) for item in given]
    if not isinstance(given, dict):
        return given
    if not isinstance(kind := given.get("type"), str):  # "type" may be the name of an argument
        return {key: json_schema(value) for key, value in given.items()}
    members = {key: json_schema(value) for key, value in given.items() if key != "type"}
    return members if kind == "any" else {"type": TYPES.get(kind, kind), **members}
