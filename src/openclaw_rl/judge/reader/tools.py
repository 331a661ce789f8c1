"""Reads tool results: whether a call failed, and whether that was the call's fault.

A result that only contains errors (a log file, a web page) is a success. A call that could not do its work is an error:
a wrong name or option, missing permission, a program that ends with an error, tests that fail. A failure from outside
(the network, a limit, a service, the user) is unclear, and so is a result without any evidence.
"""

from collections.abc import Iterable, Sequence

from openclaw_rl.judge.reader.kinds import ReplyKind
from openclaw_rl.judge.reader.tool_calls import Call, read_calls
from openclaw_rl.judge.reader.tool_objects import parse, read_list, read_object
from openclaw_rl.judge.reader.tool_texts import read_text


def read_tool_results(request: str, response: str, results: Sequence[str]) -> ReplyKind:
    """Read all results of one turn's calls. One wrong call makes the turn wrong."""
    call = read_calls(request, response)
    return worst(read_tool_result(result, call) for result in results)


def worst(kinds: Iterable[ReplyKind]) -> ReplyKind:
    """The worst kind: an error, then unclear, then success."""
    distinct = set(kinds)
    return next(
        (kind for kind in (ReplyKind.TOOL_ERROR, ReplyKind.UNCLEAR) if kind in distinct), ReplyKind.TOOL_SUCCESS
    )


def read_tool_result(result: str, call: Call) -> ReplyKind:
    """Read one result."""
    data = parse(result)
    if isinstance(data, dict):
        return read_object(data, call)
    return read_list(data, call) if isinstance(data, list) else read_text(result, call)
