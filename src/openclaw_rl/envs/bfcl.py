"""BFCL's 200 stateful multi-turn tasks (Berkeley Function Calling Leaderboard) as an environment.

Needs the package `bfcl-eval`, installed with `pip install --no-deps bfcl-eval`: its requirements pin old versions of
packages that others need, and these tasks use none of them.

A task has several requests of a user, which come one after the other: the next one comes when an answer has no calls.
As on the leaderboard, a request is fulfilled if the state of all tools then equals the state after the reference calls,
and if every result of the reference calls is among the results so far.

    reward = requests fulfilled before the first that is not / all requests

- An attempt is solved if all its requests are fulfilled. It ends with the first that is not.
- Calls are looked up by name and run with their arguments. Nothing that the model wrote is evaluated as code, which
  `bfcl-eval` itself does.
"""

import ast
import copy
import functools
import importlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openclaw_rl.config.options import ConfigError
from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Step, Task, Tool
from openclaw_rl.envs.calls import MadeCall, read_calls
from openclaw_rl.lab.bfcl_data import find_data, json_schema, read_entries, read_with_answers
from openclaw_rl.lab.tasks import checked_split, in_rounds, split_of, text_digest

TASKS = "BFCL_v4_multi_turn_base.json"
SOURCES = "bfcl_eval.eval_checker.multi_turn_eval.func_source_code"
#: Class of tools → its module and the file that describes its functions, which have the same name but for this one.
CLASSES = {
    "GorillaFileSystem": "gorilla_file_system",
    "MathAPI": "math_api",
    "MessageAPI": "message_api",
    "TwitterAPI": "posting_api",
    "TicketAPI": "ticket_api",
    "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking",
    "VehicleControlAPI": "vehicle_control",
}
#: Has no state to load.
STATELESS = "MathAPI"
#: Arguments whose size decides how long a call takes, and their largest value.
LARGEST = {"precision": 100, "exponent": 1000, "decimal_places": 100}
#: Answers with calls that one request may take, and calls that one answer may have.
MAX_ANSWERS = 10
MAX_CALLS = 16


class Bfcl:
    """The 200 tasks, over and over in an order that depends on the seed. One in five is held out, by its name."""

    def __init__(self) -> None:
        self._tasks: dict[str, list[Task]] = {"train": [], "held-out": []}
        for entry in read_tasks():
            split = split_of(text_digest(entry["id"]))
            self._tasks[split].append(Task(f"bfcl/{split}/{entry['id']}", entry))

    def tasks(self, split: str, seed: int) -> Iterator[Task]:
        return in_rounds("bfcl", self._tasks[checked_split("bfcl", split)], seed)

    def open(self, task: Task) -> "BfclEpisode":
        return BfclEpisode(task.data)


class BfclEpisode:
    """One attempt: the tools of a task with the policy's state, and with the state of the reference calls."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.tools = tools_of(entry)
        self._names = {tool["function"]["name"] for tool in self.tools}
        self._requests: Sequence[Sequence[Message]] = entry["question"]
        self._reference: Sequence[Sequence[str]] = entry["ground_truth"]
        self._policy_side = Tools(entry)
        self._reference_side = Tools(entry)
        self._results: list[str] = []
        self._fulfilled = 0
        self._answers = 0
        self._called = False

    async def start(self) -> Sequence[Message]:
        return self._requests[0]

    async def step(self, answer: Message) -> Step:
        calls = read_calls(answer, self.tools)
        self._answers += 1
        if len(calls) > MAX_CALLS:
            return Step(reward=0.0, hint=f"Make at most {MAX_CALLS} calls at once.", done=True)
        if calls and self._answers <= MAX_ANSWERS:
            problem = next((call.problem for call in calls if call.problem), "")
            return Step([self._run(call) for call in calls], hint=problem)
        return self._end_of_request()

    async def outcome(self) -> Outcome:
        return Outcome(self._fulfilled / len(self._requests), self._fulfilled == len(self._requests))

    async def close(self) -> None:
        """Nothing to close."""

    def _run(self, call: MadeCall) -> Message:
        self._called = True
        if not call.name:  # text that was meant as a call
            return {"role": "user", "content": call.problem}
        # Arguments that do not satisfy the schema are passed on: one reference call has such arguments.
        known = call.name in self._names and isinstance(call.arguments, dict)
        result = self._policy_side.run(call.name, call.arguments) if known else json.dumps({"error": call.problem})
        self._results.append(result)
        return {"role": "tool", "tool_call_id": call.id, "content": result}

    def _end_of_request(self) -> Step:
        """Compare both sides; go on with the next request, if there is one and this one was fulfilled."""
        reference = self._reference[self._fulfilled]
        wanted = [self._reference_side.run(*read_reference(call, self._reference_side)) for call in reference]
        same_state = self._policy_side.state() == self._reference_side.state()
        # The leaderboard counts a request without reference calls as fulfilled whatever was done.
        if reference and not (self._called and same_state and _contains(self._results, wanted)):
            return Step(reward=0.0, hint=f"The request is not fulfilled. Call: {', '.join(reference)}", done=True)
        self._fulfilled += 1
        self._answers = 0
        self._called = False
        done = self._fulfilled == len(self._requests)
        return Step(() if done else self._requests[self._fulfilled], reward=1.0, done=done)


class Tools:
    """The tools of a task with their state."""

    def __init__(self, entry: Mapping[str, Any]) -> None:
        self.instances = {}
        for name in entry["involved_classes"]:
            instance = getattr(importlib.import_module(f"{SOURCES}.{CLASSES[name]}"), name)()
            if name != STATELESS:
                instance._load_scenario(copy.deepcopy(entry["initial_config"].get(name, {})), long_context=False)
            self.instances[name] = instance

    def function(self, name: str) -> Any:
        """The function with a name that the tools' descriptions contain."""
        return next(getattr(tool, name) for tool in self.instances.values() if hasattr(tool, name))

    def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The result of a call as the leaderboard writes it; an error is a result too."""
        try:
            for limited, largest in LARGEST.items():
                if abs(arguments.get(limited, 0)) > largest:
                    raise ValueError(f"{limited} is at most {largest}")
            result = self.function(name)(**arguments)
            return json.dumps(result) if isinstance(result, dict) else str(result)
        except Exception as error:  # noqa: BLE001 - the package's tools may raise anything
            return f"Error during execution: {error}"

    def state(self) -> list[dict[str, Any]]:
        """What is compared: the public attributes of each tool."""
        return [
            {name: value for name, value in vars(tool).items() if not name.startswith("_")}
            for tool in self.instances.values()
        ]


def read_reference(call: str, tools: Tools) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a reference call, which is written as Python: `sort('report.txt')`."""
    tree = ast.parse(call.strip(), mode="eval").body
    if not isinstance(tree, ast.Call) or not isinstance(tree.func, ast.Name):
        raise EnvFailed(f"bfcl-eval has a reference call that cannot be read: {call}.")
    names = inspect.signature(tools.function(tree.func.id)).parameters
    arguments = {name: ast.literal_eval(value) for name, value in zip(names, tree.args, strict=False)}
    return tree.func.id, arguments | {str(word.arg): ast.literal_eval(word.value) for word in tree.keywords}


def read_tasks() -> list[dict[str, Any]]:
    """The tasks with their reference calls. Raises ConfigError."""
    file = find_data(TASKS)
    try:
        return read_with_answers(file)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"The installed bfcl-eval has other tasks than 2026.3.23: {error}.") from None


def tools_of(entry: Mapping[str, Any]) -> Sequence[Tool]:
    """The descriptions of a task's tools, in OpenAI's shape."""
    excluded = entry.get("excluded_function", ())
    functions = [function for name in entry["involved_classes"] for function in _descriptions(name)]
    return [{"type": "function", "function": function} for function in functions if function["name"] not in excluded]


@functools.cache
def _descriptions(name: str) -> list[dict[str, Any]]:
    functions = read_entries(find_data(f"multi_turn_func_doc/{CLASSES[name]}.json"))
    return [
        {key: json_schema(function[key]) for key in ("name", "description", "parameters")} for function in functions
    ]


def _contains(results: Sequence[str], wanted: Sequence[str]) -> bool:
    """Whether all wanted results are there, each as often as it is wanted."""
    left = list(results)
    for result in wanted:
        if result not in left:
            return False
        left.remove(result)
    return True
