"""Tool calls: how they are read from an answer, checked, and run."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openclaw_rl.envs.base import Message, Tool
from openclaw_rl.lab.schema import mismatch

#: Text that was meant as a call, but is not one: an opening tag, or JSON with the members of a call.
MEANT_AS_CALL = re.compile(r'<tool_call|<\|python_tag\|>|"name"\s*:\s*"[^"]*"\s*,\s*"(?:arguments|parameters)"')


class ToolFailed(Exception):
    """A tool refuses its arguments; the message is for the model."""


@dataclass(frozen=True, slots=True)
class ExpectedCall:
    """A call that a task expects: which tool, with which arguments."""

    name: str
    arguments: Mapping[str, Any]

    def __str__(self) -> str:
        return json.dumps({"name": self.name, "arguments": dict(self.arguments)}, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class MadeCall:
    """A call in an answer."""

    id: str
    name: str
    arguments: Any
    problem: str = ""
    """Why it cannot be run, as a sentence for the model; empty if it can."""
    failure: str = ""
    """Why its tool refused it, in the tool's words; empty if it did not."""


class Toolbox(Protocol):
    """The tools of one episode."""

    tools: Sequence[Tool]

    async def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of the result. Raises ToolFailed if the tool refuses its arguments, EnvFailed if it is broken."""


def read_calls(answer: Message, tools: Sequence[Tool]) -> list[MadeCall]:
    """The calls in an answer, each checked against its tool's schema.

    Text that was meant as a call and is not one counts as a call with a problem, without a name.
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in tools}
    calls = [_read_call(call, schemas) for call in answer.get("tool_calls") or ()]
    if not calls and MEANT_AS_CALL.search(answer_text(answer)):
        calls = [MadeCall("", "", None, "The tool call is not valid JSON with a name and arguments.")]
    return calls


def function_tool(name: str, description: str, required: Sequence[str], properties: Mapping[str, Any]) -> Tool:
    """A tool that takes these arguments and no others."""
    schema = {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


def call_message(name: str, arguments: Mapping[str, Any], id_: str) -> Message:
    """An answer that calls a tool, as examples show it."""
    function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": id_, "type": "function", "function": function}]}


def answer_text(answer: Message) -> str:
    """The text of an answer; empty if it has none."""
    content = answer.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""


def check_json(value: Any) -> None:
    """Raise ValueError for a value that cannot be sent: numbers that are not finite, and halves of UTF-16 pairs."""
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()


def _read_call(call: Mapping[str, Any], schemas: Mapping[str, Mapping[str, Any]]) -> MadeCall:
    id_, name, written = call.get("id", ""), call["function"]["name"], call["function"].get("arguments") or "{}"
    try:
        arguments = json.loads(written)
        check_json(arguments)
    except (ValueError, RecursionError):
        return MadeCall(id_, name, None, f"The arguments of {name} are not valid JSON.")
    if name not in schemas:
        return MadeCall(id_, name, arguments, f"There is no tool {name}; the tools are {', '.join(schemas)}.")
    if not isinstance(arguments, dict):
        return MadeCall(id_, name, arguments, f"The arguments of {name} are not a JSON object.")
    problem = mismatch(arguments, schemas[name], f"the arguments of {name}")
    return MadeCall(id_, name, arguments, f"{problem[0].upper()}{problem[1:]}." if problem else "")
