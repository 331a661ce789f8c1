"""Reads the file that `--tools-config` names: OpenAI's tool schemas, and how each tool is run.

Every mistake in the file raises ConfigError with one sentence that names the tool, before any episode begins.
"""

import inspect
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from openclaw_rl.config.options import ConfigError, read_text
from openclaw_rl.http_client import is_loopback
from openclaw_rl.lab.schema import check_schema
from openclaw_rl.plugins import load_plugin
from openclaw_rl.sandbox.command import missing_fences
from openclaw_rl.sandbox.fences.run_command import PATH

OPTION = "--tools-config"
#: How a tool may be called in OpenAI's API.
TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
#: An argument's place in a command.
PLACEHOLDER = re.compile(r"\{(\w+)\}")


class StrictPart(BaseModel):
    """A part of a file: unknown members are mistakes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ToolSchema(StrictPart):
    """What the model is told about a tool."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None


class HowToRun(StrictPart):
    """Exactly one of `python`, `command` and `http`."""

    python: str | None = None
    """path/file.py:name or package.module:name; called with the arguments as keyword arguments."""
    command: list[str] | None = Field(None, min_length=1)
    """Program and arguments. `{name}` is replaced by an argument. Without any, standard input gets them as JSON."""
    readable: list[Path] = Field(default_factory=list)
    """Files and folders that the command may read besides the system's."""
    memory_mib: int = Field(512, ge=1)
    http: str | None = None
    """Called with the arguments as a JSON body, or with GET as a query."""
    http_method: Literal["GET", "POST"] = "POST"
    allow_remote: bool = False
    """Whether the address may be on another machine."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if sum(way is not None for way in (self.python, self.command, self.http)) != 1:
            raise ValueError("give exactly one of python, command and http")
        return self


class ToolDefinition(StrictPart):
    """One tool: its schema, how it is run, and its limits."""

    type: Literal["function"] = "function"
    function: ToolSchema
    run: HowToRun
    timeout: float = Field(10.0, gt=0)
    """Seconds for one call."""
    max_output: int = Field(4000, ge=1)
    """Most characters of a result that the model sees."""


class ToolsConfig(StrictPart):
    """The whole file."""

    tools: list[ToolDefinition] = Field(min_length=1)
    tasks: Path
    """A file with one JSON object a line; see `tasks`."""
    system: str = ""
    """A system prompt for tasks that have none."""
    max_turns: int = Field(8, ge=1)
    max_calls: int = Field(16, ge=1, le=64)
    """Each gets a message, and a step has at most 64."""


def read_tools_config(path: Path) -> ToolsConfig:
    """Read and check the file. Paths in it are relative to its folder. Raises ConfigError."""
    path = path.expanduser()
    content = _parse(path)
    try:
        config = ToolsConfig.model_validate(content)
    except ValidationError as error:
        raise ConfigError(f"{OPTION}: {path}: {_first_problem(error, content)}.") from None
    folder = path.resolve().parent
    names = [tool.function.name for tool in config.tools]
    for tool in config.tools:
        if names.count(tool.function.name) > 1:
            raise ConfigError(f"{OPTION}: {path} defines the tool {tool.function.name} twice.")
    tools = [_checked(tool, folder, f"{OPTION}: {path}: the tool {tool.function.name}") for tool in config.tools]
    return config.model_copy(update={"tools": tools, "tasks": folder / config.tasks})


def _parse(path: Path) -> Any:
    text = read_text(path, OPTION)
    try:
        if path.suffix == ".json":
            return json.loads(text)
        if path.suffix in (".yaml", ".yml"):
            return yaml.safe_load(text)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{OPTION}: {path} cannot be read: {' '.join(str(error).split())}.") from None
    raise ConfigError(f"{OPTION}: {path} must end with .json, .yaml or .yml.")


def _first_problem(error: ValidationError, content: Any) -> str:
    """The first problem in words; a tool is named by its name where it has one."""
    problem = error.errors()[0]
    place = ".".join(str(part) for part in problem["loc"])
    if problem["loc"][:1] == ("tools",) and len(problem["loc"]) > 1:
        tool = content["tools"][problem["loc"][1]]
        function = tool.get("function") if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        place = f"the tool {name or problem['loc'][1]}: " + ".".join(map(str, problem["loc"][2:]))
    return f"{place or 'the file'}: {problem['msg']}".replace(": : ", ": ").replace("Value error, ", "")


def _checked(tool: ToolDefinition, folder: Path, place: str) -> ToolDefinition:
    """A tool whose parts were checked and whose paths are absolute. Raises ConfigError."""
    if not TOOL_NAME.fullmatch(tool.function.name):
        raise ConfigError(f"{place} needs a name of letters, digits, _ and -.")
    parameters = tool.function.parameters
    try:
        check_schema(parameters, "the schema")
    except ValueError as error:
        raise ConfigError(f"{place}: {error}.") from None
    if parameters.get("type") != "object":
        raise ConfigError(f"{place}: the type of its parameters must be object.")
    if tool.run.python is not None:
        return _with_run(tool, python=_checked_function(tool.run.python, parameters, folder, place))
    if tool.run.http is not None:
        _check_address(tool.run.http, tool.run.allow_remote, place)
        return tool
    return _checked_command(tool, folder, place)


def _checked_function(given: str, parameters: Mapping[str, Any], folder: Path, place: str) -> str:
    """The function's place, absolute; it was imported, and takes what the schema promises."""
    file, sign, name = given.partition(":")
    if not sign or not name:
        raise ConfigError(f"{place}: python must be path/file.py:name or package.module:name.")
    if file.endswith(".py"):
        given = f"{folder / Path(file).expanduser()}:{name}"
    function = load_plugin(given, place, ())
    if not callable(function):
        raise ConfigError(f"{place}: {name} is not a function.")
    takes = inspect.signature(function).parameters.values()
    for parameter in parameters.get("properties", {}):
        if not any(known.name == parameter or known.kind is known.VAR_KEYWORD for known in takes):
            raise ConfigError(f"{place}: the function {name} does not take {parameter!r}, which the schema has.")
    for known in takes:
        named = known.kind in (known.POSITIONAL_OR_KEYWORD, known.KEYWORD_ONLY)
        if named and known.default is known.empty and known.name not in parameters.get("required", []):
            raise ConfigError(f"{place}: the function {name} needs {known.name!r}, which the schema does not require.")
    return given


def _check_address(address: str, allow_remote: bool, place: str) -> None:
    try:
        parts = urlsplit(address)
        _ = parts.port  # raises for one that cannot be
    except ValueError:
        raise ConfigError(f"{place}: {address} is not an http address.") from None
    if "@" in parts.netloc:
        raise ConfigError(f"{place}: its address must not contain a user name or a password.")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{place}: {address} is not an http address.")
    if not allow_remote and not is_loopback(address):
        raise ConfigError(f"{place}: {parts.hostname} is another machine; add allow_remote: true to allow it.")


def _checked_command(tool: ToolDefinition, folder: Path, place: str) -> ToolDefinition:
    command = tool.run.command or []
    if missing := missing_fences():
        raise ConfigError(f"{place} runs a command, which cannot be confined on this machine: it lacks {missing}.")
    for argument in command:
        for name in PLACEHOLDER.findall(argument):
            if name not in tool.function.parameters.get("properties", {}):
                raise ConfigError(f"{place}: {{{name}}} in its command is not one of its parameters.")
    if PLACEHOLDER.search(command[0]):
        raise ConfigError(f"{place}: the program of its command must be fixed.")
    # A file beside the configuration is meant by its name alone; the command may read it wherever it is.
    files = {argument: path for argument in command if (path := folder / Path(argument).expanduser()).is_file()}
    if command[0] not in files and shutil.which(command[0], path=PATH) is None:
        raise ConfigError(f"{place}: there is no program {command[0]} in {PATH}.")
    readable = [*(folder / path for path in tool.run.readable), *files.values()]
    for path in readable:
        if not path.exists():
            raise ConfigError(f"{place}: there is no {path}.")
        if os.getuid() == 0 and (closed := _closed_to_others(path)):
            raise ConfigError(
                f"{place}: commands of root run as nobody, who may not read {closed}; change its mode or move it."
            )
    return _with_run(tool, command=[str(files.get(argument, argument)) for argument in command], readable=readable)


def _closed_to_others(path: Path) -> Path | None:
    """The file, or the folder on the way to it, that other users may not read or enter; None if all is open."""
    if not path.stat().st_mode & stat.S_IROTH:
        return path
    return next((folder for folder in path.resolve().parents if not folder.stat().st_mode & stat.S_IXOTH), None)


def _with_run(tool: ToolDefinition, **changes: Any) -> ToolDefinition:
    return tool.model_copy(update={"run": tool.run.model_copy(update=changes)})
