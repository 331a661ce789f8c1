"""The simple Python cases of the Berkeley Function Calling Leaderboard, where its package `bfcl-eval` is installed.

Only its data is used. Values are compared as in `tool_use`, which ignores less punctuation than the leaderboard does:
scores are close to the published ones but not the same.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from openclaw_rl.evals.tool_use import Expected, ToolCase
from openclaw_rl.lab.bfcl_data import find_data, json_schema, read_with_answers

#: The file's name in the fourth version and in the third.
PATTERNS = ("BFCL_v*_simple_python.json", "BFCL_v*_simple.json")
#: In BFCL's lists of accepted values, this means that the argument may be left out.
LEFT_OUT = ""


def bfcl_cases() -> tuple[ToolCase, ...]:
    """All simple cases, one call each. Raises UserError if the package is not installed."""
    return tuple(_case(line, line["ground_truth"]) for line in read_with_answers(find_data(*PATTERNS)))


def _case(line: dict[str, Any], answers: list[dict[str, dict[str, list[Any]]]]) -> ToolCase:
    functions = [{**function, "name": _name(function["name"])} for function in line["function"]]
    tools = tuple(
        {"type": "function", "function": {**function, "parameters": json_schema(function["parameters"])}}
        for function in functions
    )
    calls = tuple(_expected(name, arguments) for answer in answers for name, arguments in answer.items())
    return ToolCase(f"bfcl/{line['id']}", line["question"][0][-1]["content"], tools, calls)


def _name(name: str) -> str:
    """The name without dots, which OpenAI's API does not allow in a function's name."""
    return name.replace(".", "_")


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
