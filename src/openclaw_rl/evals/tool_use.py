"""Function calling: does a model call the right tool with the right arguments, and no tool if none fits?

Each case is graded in three parts, and passes if all are right:

- `format`: the calls can be parsed, and their arguments are JSON that fits the tool's schema.
- `name`: the right tools are called, and no others.
- `arguments`: the case accepts the values, ignoring case and white space. Optional ones may be left out.

If no call is right, the model must answer in words.

The simple Python cases of the Berkeley Function Calling Leaderboard are graded in the same way, where its package
`bfcl-eval` is installed: scores are close to the published ones but not the same.
"""

import functools
import itertools
import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from openclaw_rl.evals.chat import Reply, Tool, ToolCall
from openclaw_rl.evals.scores import CaseScore, data_lines
from openclaw_rl.lab.bfcl_data import find_data, json_schema, read_with_answers
from openclaw_rl.lab.schema import mismatch

TASK = "tool-use"
#: Longest reply in tokens: two calls and a few words before them. A model that reasons first needs more.
MAX_TOKENS = 256
#: Marks with which models begin calls. One that is left in the text is a call that could not be parsed.
CALL_MARKS = ("<tool_call>", "<|python_tag|>", "<function=", "[TOOL_CALLS]")
#: Arguments with more opening brackets are not parsed: no tool needs so many, and deep nesting breaks the parser.
MAX_BRACKETS = 200


@dataclass(frozen=True, slots=True)
class Expected:
    """A call that should be made, with a list of accepted values for each argument."""

    name: str
    arguments: Mapping[str, Sequence[Any]]
    optional: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Arguments that may be left out but must not be wrong."""

    def accepts(self, given: Mapping[str, Any]) -> bool:
        """Whether these arguments are right."""
        if not self.arguments.keys() <= given.keys() <= self.arguments.keys() | self.optional.keys():
            return False
        accepted = {**self.arguments, **self.optional}
        return all(normalised(value) in map(normalised, accepted[name]) for name, value in given.items())


@dataclass(frozen=True, slots=True)
class ToolCase:
    """A request, the available tools, and the right calls, which may be none."""

    name: str
    prompt: str
    tools: tuple[Tool, ...]
    calls: tuple[Expected, ...]


@functools.cache
def cases() -> tuple[ToolCase, ...]:
    """All cases of this package. Their names begin with what they test."""
    functions = {function["name"]: function for function in data_lines("tools.jsonl")}
    return tuple(
        ToolCase(
            line["name"],
            line["prompt"],
            tuple({"type": "function", "function": functions[name]} for name in line["tools"]),
            tuple(Expected(**call) for call in line["calls"]),
        )
        for line in data_lines("tool_use.jsonl")
    )


def grade(case: ToolCase, reply: Reply) -> CaseScore:
    """Grade a reply in its parts. The detail names the first fault."""
    faults = {"format": _format_fault(case, reply), "name": _name_fault(case, reply)}
    # Arguments can only be right if the tools are.
    faults["arguments"] = faults["name"] or _arguments_fault(case, reply.tool_calls)
    parts = {part: float(not fault) for part, fault in faults.items()}
    written = [f"{call.name}({call.arguments})" for call in reply.tool_calls]
    answer = "\n".join(filter(None, [reply.text, *written]))
    return CaseScore(case.name, all(parts.values()), parts, answer, next(filter(None, faults.values()), ""))


def _format_fault(case: ToolCase, reply: Reply) -> str:
    mark = next((mark for mark in CALL_MARKS if mark in reply.text), None)
    if mark is not None:
        return f"There is a {mark} that could not be parsed as a call."
    if not reply.tool_calls:
        return "There is no call." if case.calls else _silence(reply)
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in case.tools}
    for call in reply.tool_calls:
        arguments = read_arguments(call)
        if arguments is None:
            return f"The arguments of {call.name} are not a JSON object."
        if fault := mismatch(arguments, schemas.get(call.name, {})):
            return f"{call.name}: {fault}."
    return ""


def _name_fault(case: ToolCase, reply: Reply) -> str:
    called, expected = (Counter(call.name for call in calls) for calls in (reply.tool_calls, case.calls))
    if called == expected:
        return "" if called else _silence(reply)
    names, right = (", ".join(counted.elements()) or "nothing" for counted in (called, expected))
    return f"It calls {names} instead of {right}."


def _silence(reply: Reply) -> str:
    """A fault if the reply is empty, which is wrong even where no call is expected."""
    return "" if reply.text.strip() else "There is no call and no answer."


def _arguments_fault(case: ToolCase, calls: Sequence[ToolCall]) -> str:
    """A fault in the arguments. The calls may come in any order."""
    given = [read_arguments(call) for call in calls]
    for order in itertools.permutations(case.calls):
        pairs = list(zip(order, calls, given, strict=True))
        if all(one.name == call.name and got is not None and one.accepts(got) for one, call, got in pairs):
            return ""
    wrong = [call for call, got in zip(calls, given, strict=True) if not _fits_one(case, call.name, got)]
    return f"Wrong arguments: {', '.join(f'{call.name}({call.arguments})' for call in wrong or calls)}."[:500]


def _fits_one(case: ToolCase, name: str, given: Mapping[str, Any] | None) -> bool:
    return given is not None and any(one.name == name and one.accepts(given) for one in case.calls)


def read_arguments(call: ToolCall) -> dict[str, Any] | None:
    """A call's arguments; None if they are not a JSON object."""
    if call.arguments.count("[") + call.arguments.count("{") > MAX_BRACKETS:
        return None
    try:
        arguments = json.loads(call.arguments)
    except (ValueError, RecursionError):
        return None
    return arguments if isinstance(arguments, dict) else None


def normalised(value: Any) -> Any:
    """A value without the case and white space of its texts. Numbers, texts and booleans stay distinct."""
    if isinstance(value, str):
        return "".join(unicodedata.normalize("NFKC", value).casefold().split())
    if isinstance(value, list):
        return [normalised(item) for item in value]
    if isinstance(value, dict):
        return {key: normalised(member) for key, member in value.items()}
    return ("bool", value) if isinstance(value, bool) else value


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
