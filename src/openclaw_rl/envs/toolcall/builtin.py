"""The built-in tasks and their tools. Results are computed; what the tools look up is part of the task.

A draft is one question; its answer is computed by the tools themselves. Each kind of task draws drafts with one call
and drafts with two calls, of which the second needs the result of the first.
"""

import datetime
import json
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from openclaw_rl.envs.base import Tool
from openclaw_rl.envs.calls import ExpectedCall, ToolFailed, function_tool

#: The largest number that tools take, so that results stay readable.
LARGEST = 1e12
#: Digits after the point in results.
DECIMALS = 4
OPERATIONS: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
}
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
FIRST_NAMES = (
    *("Ada", "Carl", "Dina", "Egon", "Fay", "Hana", "Ivo"),
    *("Jana", "Kai", "Lena", "Mara", "Nils", "Olga", "Paul"),
)
LAST_NAMES = (
    *("Adler", "Brandt", "Cole", "Diaz", "Evans", "Frost", "Gray"),
    *("Holt", "Ito", "Jensen", "Klein", "Lund", "Moss"),
)
CITIES = ("Bergen", "Cairo", "Delhi", "Lima", "Lyon", "Osaka", "Porto", "Quito", "Turin", "Vienna")
TEAMS = ("design", "finance", "legal", "research", "sales", "security", "support", "training")
EVENT_NAMES = (
    *("audit", "concert", "dinner", "exam", "launch", "lecture"),
    *("match", "meeting", "party", "picnic", "review"),
)
OWNERS = ("board", "budget", "chess", "choir", "garden", "music", "school", "science", "spring", "summer", "tennis")
PEOPLE_IN_DIRECTORY = 6
EVENTS_IN_CALENDAR = 5
FIRST_DAY = datetime.date(2026, 1, 1)
DAYS = 6 * 365


# Tools


def calculate(_world: World, operation: str, a: float, b: float) -> Value:
    _check_sizes(a, b)
    if operation == "divide" and b == 0:
        raise ToolFailed("Nothing can be divided by 0.")
    return _rounded(OPERATIONS[operation](a, b))


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
    (dimension, factor) = UNITS[from_unit]
    (other, divisor) = UNITS[to_unit]
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
    return function_tool(name, description, list(properties), properties)


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
    a = arguments.get("a")
    b = arguments.get("b")
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


# Tasks


@dataclass(frozen=True)
class Draft:
    """A question, the calls that lead to its answer, and what the tools look things up in."""

    question: str
    calls: Sequence[ExpectedCall]
    world: World = field(default_factory=dict)

    @property
    def answer(self) -> Value:
        """The result of the last call."""
        return run(self.world, self.calls[-1])


@dataclass(frozen=True)
class TaskKind:
    """A kind of task: its tools, and how drafts with one and with two calls are drawn."""

    tools: Sequence[str]
    one_call: Callable[[Random], Draft]
    two_calls: Callable[[Random], Draft]


def run(world: World, call: ExpectedCall) -> Value:
    return FUNCTIONS[call.name](world, **call.arguments)


# Calculator

ASKING = {
    "add": ("What is {a} plus {b}?", "Add {a} and {b}.", "What is the sum of {a} and {b}?"),
    "subtract": ("What is {a} minus {b}?", "How much is {a} less {b}?", "What is the difference {a} - {b}?"),
    "multiply": ("What is {a} times {b}?", "Multiply {a} by {b}.", "What is the product of {a} and {b}?"),
    "divide": ("What is {a} divided by {b}?", "Divide {a} by {b}.", "How often does {b} fit into {a}?"),
}
THEN = {
    "add": "add {c} to the result",
    "subtract": "subtract {c} from the result",
    "multiply": "multiply the result by {c}",
}


def _arithmetic(random: Random) -> tuple[str, ExpectedCall]:
    operation = random.choice(list(OPERATIONS))
    a = random.randint(2, 999)
    b = random.randint(2, 99)
    if operation == "divide":
        a *= b  # so that the result is whole
    question = random.choice(ASKING[operation]).format(a=a, b=b)
    return question, ExpectedCall("calculate", {"operation": operation, "a": a, "b": b})


def one_calculation(random: Random) -> Draft:
    question, call = _arithmetic(random)
    return Draft(question, [call])


def two_calculations(random: Random) -> Draft:
    question, first = _arithmetic(random)
    operation = random.choice(list(THEN))
    c = random.randint(2, 99)
    second = ExpectedCall("calculate", {"operation": operation, "a": run({}, first), "b": c})
    return Draft(f"{question} Then {THEN[operation].format(c=c)}.", [first, second])


# Look-up

ASKING_FOR = {
    "extension": ("What is the extension of {name}?", "Find the extension of {name}."),
    "city": ("In which city is {name}?", "Find the city of {name}."),
    "team": ("In which team is {name}?", "Find the team of {name}."),
    "manager": ("Who is the manager of {name}?", "Find the manager of {name}."),
}


def _directory(random: Random) -> dict[str, dict[str, Value]]:
    names = [f"{first} {random.choice(LAST_NAMES)}" for first in random.sample(FIRST_NAMES, PEOPLE_IN_DIRECTORY)]
    return {
        name: {
            "extension": random.randint(1000, 9999),
            "city": random.choice(CITIES),
            "team": random.choice(TEAMS),
            "manager": random.choice([other for other in names if other != name]),
        }
        for name in names
    }


def one_look_up(random: Random) -> Draft:
    people = _directory(random)
    name = random.choice(list(people))
    wanted = random.choice(list(ASKING_FOR))
    question = random.choice(ASKING_FOR[wanted]).format(name=name)
    return Draft(question, [ExpectedCall("look_up", {"name": name, "field": wanted})], {"people": people})


def two_look_ups(random: Random) -> Draft:
    people = _directory(random)
    name = random.choice(list(people))
    wanted = random.choice(list(ASKING_FOR))
    manager = people[name]["manager"]
    question = random.choice(ASKING_FOR[wanted]).format(name=f"the manager of {name}")
    calls = [
        ExpectedCall("look_up", {"name": name, "field": "manager"}),
        ExpectedCall("look_up", {"name": manager, "field": wanted}),
    ]
    return Draft(question, calls, {"people": people})


# Calendar


def _day(random: Random) -> str:
    return (FIRST_DAY + datetime.timedelta(days=random.randrange(DAYS))).isoformat()


def _events(random: Random) -> dict[str, str]:
    titles = {f"{random.choice(OWNERS)} {name}" for name in random.sample(EVENT_NAMES, EVENTS_IN_CALENDAR)}
    return {title: _day(random) for title in sorted(titles)}


def one_date(random: Random) -> Draft:
    events = _events(random)
    date = _day(random)
    days = random.randint(2, 90)
    title = random.choice(list(events))
    question, call = random.choice(
        [
            (f"Which day of the week is {date}?", ExpectedCall("weekday", {"date": date})),
            (f"Which date is {days} days after {date}?", ExpectedCall("add_days", {"date": date, "days": days})),
            (f"On which date is the {title}?", ExpectedCall("find_event", {"title": title})),
        ]
    )
    return Draft(question, [call], {"events": events})


def two_dates(random: Random) -> Draft:
    events = _events(random)
    date = _day(random)
    days = random.randint(2, 90)
    title = random.choice(list(events))
    find = ExpectedCall("find_event", {"title": title})
    later = ExpectedCall("add_days", {"date": date, "days": days})
    shifted = str(FUNCTIONS["add_days"]({}, date, days))
    question, calls = random.choice(
        [
            (f"On which day of the week is the {title}?", [find, ExpectedCall("weekday", {"date": events[title]})]),
            (
                f"Which date is {days} days after the {title}?",
                [find, ExpectedCall("add_days", {"date": events[title], "days": days})],
            ),
            (
                f"Which day of the week is {days} days after {date}?",
                [later, ExpectedCall("weekday", {"date": shifted})],
            ),
        ]
    )
    return Draft(question, calls, {"events": events})


# Units


def _conversion(random: Random) -> tuple[int, str, str]:
    """A value, its unit and another unit of the same dimension."""
    unit = random.choice(list(UNITS))
    others = [name for name, (dimension, _) in UNITS.items() if dimension == UNITS[unit][0] and name != unit]
    return random.randint(2, 500), unit, random.choice(others)


def one_conversion(random: Random) -> Draft:
    value, unit, wanted = _conversion(random)
    wording = random.choice(("Convert {0} {1} to {2}.", "What is {0} {1} in {2}?", "Express {0} {1} in {2}."))
    call = ExpectedCall("convert", {"value": value, "from_unit": unit, "to_unit": wanted})
    return Draft(wording.format(value, unit, wanted), [call])


def conversion_and_product(random: Random) -> Draft:
    value, unit, wanted = _conversion(random)
    count = random.randint(2, 20)
    first = ExpectedCall("convert", {"value": value, "from_unit": unit, "to_unit": wanted})
    second = ExpectedCall("calculate", {"operation": "multiply", "a": run({}, first), "b": count})
    return Draft(f"Convert {value} {unit} to {wanted}. Then multiply the result by {count}.", [first, second])


KINDS: Mapping[str, TaskKind] = {
    "calculator": TaskKind(["calculate"], one_calculation, two_calculations),
    "lookup": TaskKind(["look_up"], one_look_up, two_look_ups),
    "calendar": TaskKind(["find_event", "weekday", "add_days"], one_date, two_dates),
    "units": TaskKind(["convert"], one_conversion, conversion_and_product),
}
