"""Commands in an answer: from a tool call, or from a fenced block of its text."""

import re
from dataclasses import dataclass

from openclaw_rl.envs.base import Message, Tool
from openclaw_rl.envs.calls import answer_text, call_message, read_calls

#: Names of languages after a fence whose block is a command.
SHELLS = ("", "bash", "sh", "shell", "console", "terminal", "zsh")
#: A fenced block; one that is cut off by the end of the text counts too.
BLOCK = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)
#: The same on a single line.
SHORT_BLOCK = re.compile(r"```[ \t]*(?:bash|sh|shell)[ \t]+([^`\n]+?)[ \t]*```")

ONLY_THE_FIRST = "This call was not run: only the first call of an answer is run."

BASH_TOOL: Tool = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in the shell.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@dataclass(frozen=True, slots=True)
class GivenCommand:
    """The command of an answer."""

    text: str
    """Empty if the answer has none, or one that cannot be read."""
    call: str = ""
    """The id of the tool call that gave it; empty for a block."""
    problem: str = ""
    """Why it cannot be read, as a sentence for the model."""
    other_calls: tuple[str, ...] = ()
    """The ids of further tool calls, which are not run."""


def read_command(answer: Message) -> GivenCommand:
    """The first command of an answer. A tool call comes before a block."""
    calls = read_calls(answer, [BASH_TOOL])
    if calls:
        first, *others = calls
        command = "" if first.problem else first.arguments["command"]
        return GivenCommand(command, first.id, first.problem, tuple(call.id for call in others))
    return GivenCommand(first_block(answer_text(answer)))


def first_block(text: str) -> str:
    """The command in the first fenced block of a shell; empty if there is none."""
    for language, body in BLOCK.findall(text):
        if language.lower() in SHELLS and body.strip():
            return "\n".join(line.removeprefix("$ ") for line in body.rstrip().splitlines())
    short = SHORT_BLOCK.search(text)
    return short[1] if short else ""


def block_of(command: str) -> Message:
    """An answer with a command in a block."""
    return {"role": "assistant", "content": f"```bash\n{command}\n```"}


def call_of(command: str, id_: str) -> Message:
    """An answer with a command in a tool call."""
    return call_message("bash", {"command": command}, id_)


def results_for(given: GivenCommand, text: str) -> list[Message]:
    """The messages that answer a command: one for each tool call, else one of the user."""
    if not given.call:
        return [{"role": "user", "content": text}]
    results = [(given.call, text), *((id_, ONLY_THE_FIRST) for id_ in given.other_calls)]
    return [{"role": "tool", "tool_call_id": id_, "content": content} for id_, content in results]
