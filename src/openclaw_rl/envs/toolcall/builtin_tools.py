"""The built-in tools. Their results are computed; what they look up is part of the task."""

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from openclaw_rl.envs.base import Tool
from openclaw_rl.envs.calls import ToolFailed

#: The largest number that tools take, so that results stay readable.
LARGEST = 1e12
#: Digits after the point in results.
DECIMALS = 4
OPERATIONS = ("add", "subtract", "multiply", "divide")
FIELDS = ("extension", "city", "team", "manager")
#: Unit → (dimension, how many of the dimension's base unit it is).
UNITS = {
    "m": ("length", 1.0),
    "km": ("length", 1000.0),
    "ft": ("length", 0.3048),
    "mi": ("length", 1609.344),
    "g": ("mass", 1.0),
    "kg": ("mass", 1000.0),
    "oz": ("mass", 28.349523125),
    "lb": ("mass", 453.59237),
    "s": ("time", 1.0),
    "min": ("time", 60.0),
    "h": ("time", 3600.0),
    "l": ("volume", 1.0),
    "pt": ("volume", 0.473176473),
    "gal": ("volume", 3.785411784),
}
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")

#: What a task's tools look things up in: {"people": {name: {field: value}}, "events": {title: date}}.
World = Mapping[str, Any]
#: The result of a tool. Text and numbers can be the answer to a task.
Value = str | float


def calculate(_world: World, operation: str, a: float, b: float) -> Value:
    _check_sizes(a, b)
    if operation == "divide" and b == 0:
        raise ToolFailed("Nothing can be divided by 0.")
    match operation:
        case "add":
            return _rounded(a + b)
        case "subtract":
            return _rounded(a - b)
        case "multiply":
            return _rounded(a * b)
        case _:
            return _rounded(a / b)


def look_up(world: World, name: str, field: str) -> Value:
    people: Mapping[str, Mapping[str, Value]] = world.get("people", {})
    if name not in people:
        raise ToolFailed(f"There is nobody with the name {name} in the directory.")
    return people[name][field]


def find_event(world: World, title: str) -> Value:
    events: Mapping[str, str] = world.get("events", {})
    if title not in events:
        raise ToolFailed(f"There is no event with the title {title}.")
    return events[title]


def weekday(_world: World, date: str) -> Value:
    return WEEKDAYS[_date(date).weekday()]


def add_days(_world: World, date: str, days: float) -> Value:
    try:
        return (_date(date) + datetime.timedelta(days=int(days))).isoformat()
    except OverflowError:
        raise ToolFailed("The calendar does not reach that far.") from None


def convert(_world: World, value: float, from_unit: str, to_unit: str) -> Value:
    _check_sizes(value)
    (dimension, factor), (other, divisor) = UNITS[from_unit], UNITS[to_unit]
    if dimension != other:
        raise ToolFailed(f"{from_unit} measures {dimension}, {to_unit} measures {other}.")
    return _rounded(value * factor / divisor)


def _check_sizes(*numbers: float) -> None:
    if not all(abs(number) <= LARGEST for number in numbers):
        raise ToolFailed(f"Numbers must be between -{LARGEST:.0e} and {LARGEST:.0e}.")


def _rounded(value: float) -> float:
    """A number as a result: rounded, and whole if it is whole."""
    rounded = round(value, DECIMALS)
    return int(rounded) if float(rounded).is_integer() else rounded


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise ToolFailed(f"{text} is not a date; write it as YEAR-MONTH-DAY, for example 2026-03-09.") from None


def _tool(name: str, description: str, /, **properties: Mapping[str, Any]) -> Tool:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_NUMBER = {"type": "number"}
_DATE = {"type": "string", "description": "YEAR-MONTH-DAY"}

TOOLS: dict[str, Tool] = {
    tool["function"]["name"]: tool
    for tool in (
        _tool(
            "calculate",
            "Calculate with two numbers.",
            operation={"type": "string", "enum": list(OPERATIONS)},
            a=_NUMBER,
            b=_NUMBER,
        ),
        _tool(
            "look_up",
            "Look a person up in the directory.",
            name={"type": "string"},
            field={"type": "string", "enum": list(FIELDS)},
        ),
        _tool("find_event", "Find the date of an event.", title={"type": "string"}),
        _tool("weekday", "Find the day of the week of a date.", date=_DATE),
        _tool("add_days", "Add days to a date.", date=_DATE, days={"type": "integer"}),
        _tool(
            "convert",
            "Convert a value from one unit to another.",
            value=_NUMBER,
            from_unit={"type": "string", "enum": list(UNITS)},
            to_unit={"type": "string", "enum": list(UNITS)},
        ),
    )
}
FUNCTIONS: dict[str, Callable[..., Value]] = {
    function.__name__: function for function in (calculate, look_up, find_event, weekday, add_days, convert)
}


def normalise(name: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Arguments in one form: the order of summands and of factors does not matter."""
    a, b = arguments.get("a"), arguments.get("b")
    commutes = name == "calculate" and arguments.get("operation") in ("add", "multiply")
    if commutes and isinstance(a, int | float) and isinstance(b, int | float) and b < a:
        return {**arguments, "a": b, "b": a}
    return arguments


class BuiltinToolbox:
    """Some of the built-in tools, with what they look things up in."""

    def __init__(self, names: Sequence[str], world: World) -> None:
        self.tools: Sequence[Tool] = [TOOLS[name] for name in names]
        self._world = world

    async def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        result = FUNCTIONS[name](self._world, **arguments)
        return json.dumps(result, ensure_ascii=False) if not isinstance(result, str) else result
