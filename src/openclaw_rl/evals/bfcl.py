"""The simple Python cases of the Berkeley Function Calling Leaderboard, where its package `bfcl-eval` is installed.

Only its data is used. Values are compared as in `tool_use`, which ignores less punctuation than the leaderboard does:
scores are close to the published ones but not the same.
"""

import importlib.util
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from openclaw_rl.errors import UserError
from openclaw_rl.evals.tool_use import Expected, ToolCase

#: `--no-deps`, because only the data is needed and the package's requirements would replace this project's NumPy.
INSTALL = "BFCL's cases are not installed: run `pip install --no-deps bfcl-eval`."
#: The file's name in the fourth version and in the third.
PATTERNS = ("BFCL_v*_simple_python.json", "BFCL_v*_simple.json")
#: BFCL's names of types, and JSON schema's.
TYPES = {"dict": "object", "float": "number", "tuple": "array"}
#: In BFCL's lists of accepted values, this means that the argument may be left out.
LEFT_OUT = ""


def bfcl_cases() -> tuple[ToolCase, ...]:
    """All simple cases, one call each. Raises UserError if the package is not installed."""
    questions = _questions_file()
    answers = {
        line["id"]: line["ground_truth"] for line in _lines(questions.parent / "possible_answer" / questions.name)
    }
    return tuple(_case(line, answers[line["id"]]) for line in _lines(questions))


def _questions_file() -> Path:
    # The package is located but not imported, because an import would need everything that it requires.
    spec = importlib.util.find_spec("bfcl_eval")
    folders = [Path(place) / "data" for place in (spec.submodule_search_locations or ())] if spec else []
    files = [path for pattern in PATTERNS for folder in folders for path in sorted(folder.glob(pattern))]
    if not files:
        raise UserError(INSTALL)
    return files[0]


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]


def _case(line: dict[str, Any], answers: list[dict[str, dict[str, list[Any]]]]) -> ToolCase:
    functions = [{**function, "name": _name(function["name"])} for function in line["function"]]
    tools = tuple(
        {"type": "function", "function": {**function, "parameters": _schema(function["parameters"])}}
        for function in functions
    )
    calls = tuple(_expected(name, arguments) for answer in answers for name, arguments in answer.items())
    return ToolCase(f"bfcl/{line['id']}", line["question"][0][-1]["content"], tools, calls)


def _name(name: str) -> str:
    """The name without dots, which OpenAI's API does not allow in a function's name."""
    return name.replace(".", "_")


def _schema(given: Any) -> Any:
    """BFCL's description of parameters as a JSON schema."""
    if isinstance(given, list):
        return [_schema(item) for item in given]
    if not isinstance(given, dict):
        return given
    if not isinstance(kind := given.get("type"), str):  # "type" may be the name of an argument
        return {key: _schema(value) for key, value in given.items()}
    members = {key: _schema(value) for key, value in given.items() if key != "type"}
    return members if kind == "any" else {"type": TYPES.get(kind, kind), **members}


def _expected(name: str, arguments: Mapping[str, list[Any]]) -> Expected:
    concrete = {key: [one for value in _given(values) for one in _concrete(value)] for key, values in arguments.items()}
    needed = {key: values for key, values in concrete.items() if LEFT_OUT not in arguments[key]}
    optional = {key: values for key, values in concrete.items() if key not in needed}
    return Expected(_name(name), needed, optional)


def _given(values: list[Any]) -> list[Any]:
    return [value for value in values if value != LEFT_OUT]


def _concrete(value: Any) -> Iterator[Any]:
    """Every value that a pattern stands for: within an object, BFCL lists the accepted values of each member."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*(list(_concrete(item)) for item in value)))
    elif isinstance(value, dict):
        choices = [list(_members(key, values)) for key, values in value.items()]
        yield from (dict(itertools.chain(*chosen)) for chosen in itertools.product(*choices))
    else:
        yield value


def _members(key: str, values: list[Any]) -> Iterator[tuple[tuple[str, Any], ...]]:
    """A member of an object with each of its accepted values, or left out."""
    for value in values:
        if value == LEFT_OUT:
            yield ()
        else:
            yield from (((key, one),) for one in _concrete(value))
