"""Runs the tools of a configuration for one episode."""

import asyncio
import errno
import inspect
import json
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from openclaw_rl.aio import in_own_thread
from openclaw_rl.envs.base import EnvFailed, Tool
from openclaw_rl.envs.calls import ToolFailed, check_json
from openclaw_rl.envs.toolcall.user_config import OPTION, PLACEHOLDER, HowToRun, ToolDefinition
from openclaw_rl.plugins import load_plugin
from openclaw_rl.sandbox.command import run_command
from openclaw_rl.sandbox.fences.run_command import CANNOT_START, cannot_start
from openclaw_rl.sandbox.programs import MAX_OUTPUT, EndReason, ProgramOutcome

#: Most bytes that are read of a result, whatever the limit on characters.
BYTES_OF_A_CHARACTER = 4
#: How much of an error the model sees.
MAX_ERROR = 500


class UserToolbox:
    """The tools of one episode.

    - A tool gets arguments that satisfy its schema.
    - A tool that raises, exits with an error, answers with an error or takes too long has failed: the model sees why.
    - A function that raises EnvFailed, and an address that nothing answers at, are not the model's fault: the attempt
      does not count.
    - A result that is too long is cut, and a note says so.
    - Commands of one episode share a folder, which is deleted at its end.
    """

    def __init__(self, definitions: Sequence[ToolDefinition]) -> None:
        self.tools: Sequence[Tool] = [
            {"type": "function", "function": tool.function.model_dump(exclude_none=True)} for tool in definitions
        ]
        self._definitions = {tool.function.name: tool for tool in definitions}
        self._folder: Path | None = None

    async def run(self, name: str, arguments: Mapping[str, Any]) -> str:
        tool = self._definitions[name]
        if tool.run.python is not None:
            result = await _call_function(tool.run.python, arguments, tool.timeout)
        elif tool.run.http is not None:
            result = await _call_address(tool.run, arguments, tool.timeout, tool.max_output)
        else:
            result = await self._run_command(tool, arguments)
        return shorten(result, tool.max_output)

    async def close(self) -> None:
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def _run_command(self, tool: ToolDefinition, arguments: Mapping[str, Any]) -> str:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="openclaw-tools-"))
        argv, stdin = fill_in(tool.run.command or [], arguments)
        # More than the model sees, so that a long output rarely ends the command before it can tell how it went.
        max_output = max(MAX_OUTPUT, tool.max_output * BYTES_OF_A_CHARACTER)
        try:
            outcome = await run_command(
                argv,
                self._folder,
                stdin=stdin,
                seconds=tool.timeout,
                memory_mib=tool.run.memory_mib,
                max_output=max_output,
                readable=tool.run.readable,
                runnable=tool.run.readable,
            )
        except OSError as error:
            if error.errno == errno.E2BIG:
                raise ToolFailed("The arguments are too long for a command.") from None
            raise
        if outcome.ended is EndReason.TIMED_OUT:
            raise ToolFailed(_too_slow(tool.timeout))
        return _result_of_command(outcome, argv[0], max_output)


def _result_of_command(outcome: ProgramOutcome, program: str, max_output: int) -> str:
    """What a command printed. Raises ToolFailed if it failed, and EnvFailed if it could not be started."""
    if outcome.exit_code == CANNOT_START and outcome.stderr.startswith(cannot_start(program)):
        raise EnvFailed(outcome.stderr.strip())
    reason = (outcome.stderr or outcome.stdout).strip()[-MAX_ERROR:]
    # The sandbox ended it. Only a long result is no failure.
    ended_for_output = outcome.ended is EndReason.TOO_MUCH_OUTPUT and outcome.exit_code == -signal.SIGKILL
    if ended_for_output and len(outcome.stderr.encode()) >= max_output:
        raise ToolFailed(f"The command wrote too many errors: {reason}")
    if not ended_for_output and outcome.exit_code != 0:
        raise ToolFailed(f"The command ended with status {outcome.exit_code}: {reason}")
    return outcome.stdout


def fill_in(command: Sequence[str], arguments: Mapping[str, Any]) -> tuple[list[str], bytes]:
    """The command with its arguments, and its standard input.

    An argument stays one argument, whatever is in it. One that would be read as an option is refused, unless `--`
    stands before it. Raises ToolFailed.
    """
    if not any(map(PLACEHOLDER.search, command)):
        return list(command), json.dumps(arguments, ensure_ascii=False).encode("utf-8", "replace")
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    if wrong := [name for name, text in texts.items() if "\0" in text]:
        raise ToolFailed(f"{wrong[0]!r} must not contain a null character.")
    argv: list[str] = []
    for part in command:
        names = PLACEHOLDER.findall(part)
        if any(name not in texts for name in names):
            continue  # an optional argument that was not given
        filled = PLACEHOLDER.sub(lambda match: texts[match[1]], part)
        if part.startswith("{") and filled.startswith("-") and "--" not in argv:
            raise ToolFailed(f"{names[0]!r} must not begin with a hyphen.")
        argv.append(filled)
    return argv, b""


def shorten(text: str, at_most: int) -> str:
    """A result of at most so many characters, with a note if it was longer."""
    return text if len(text) <= at_most else f"{text[:at_most]}\n[cut: only the first {at_most} characters are shown]"


def _too_slow(seconds: float) -> str:
    return f"The tool did not finish within {seconds:g} seconds."


async def _call_function(given: str, arguments: Mapping[str, Any], seconds: float) -> str:
    function = load_plugin(given, OPTION, ())
    try:
        async with asyncio.timeout(seconds):
            made = function(**arguments) if inspect.iscoroutinefunction(function) else None
            result = await (made if made is not None else in_own_thread(partial(function, **arguments), "tool"))
    except TimeoutError:
        raise ToolFailed(_too_slow(seconds)) from None
    except EnvFailed:
        raise
    except Exception as error:
        raise ToolFailed(f"{type(error).__name__}: {error}"[:MAX_ERROR]) from error
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


async def _call_address(how: HowToRun, arguments: Mapping[str, Any], seconds: float, max_output: int) -> str:
    address = httpx.URL(how.http or "")
    try:
        check_json(arguments)
        target = _with_query(address, arguments) if how.http_method == "GET" else address
    except (ValueError, httpx.InvalidURL) as error:
        raise ToolFailed(f"The arguments cannot be sent: {error}"[:MAX_ERROR]) from None
    body_of_request = None if how.http_method == "GET" else dict(arguments)
    body = bytearray()
    try:
        # Never through a proxy, and never to another address than the given one.
        async with (
            asyncio.timeout(seconds),
            httpx.AsyncClient(trust_env=False, timeout=seconds) as http,
            http.stream(how.http_method, target, json=body_of_request) as response,
        ):
            async for piece in response.aiter_bytes():
                body += piece
                if len(body) > max_output * BYTES_OF_A_CHARACTER:
                    break
    except (TimeoutError, httpx.TimeoutException):
        raise ToolFailed(_too_slow(seconds)) from None
    except httpx.HTTPError as error:
        raise EnvFailed(f"{address} does not answer: {str(error) or type(error).__name__}.") from error
    text = body.decode("utf-8", "replace")
    if not response.is_success:
        raise ToolFailed(f"The tool answered with status {response.status_code}: {text[:MAX_ERROR]}")
    return text


def _with_query(address: httpx.URL, arguments: Mapping[str, Any]) -> httpx.URL:
    """The address with the arguments in its query. An argument does not replace what is there already."""
    query = {name: value if isinstance(value, str) else json.dumps(value) for name, value in arguments.items()}
    return address.copy_with(params=httpx.QueryParams(query).merge(address.params))
