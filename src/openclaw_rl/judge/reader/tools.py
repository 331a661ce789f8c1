"""Reads what tools returned: whether the call went wrong, and whether that was the call's fault.

A result that only tells of errors (a log that was read, a page that was found) is a success. What is no fault of the
call (the network, a limit, missing rights) is unclear, and so is a result that is no evidence of anything.
"""

from collections.abc import Iterable, Sequence

from openclaw_rl.judge.reader.kinds import ReplyKind
from openclaw_rl.judge.reader.tool_calls import Call, read_calls
from openclaw_rl.judge.reader.tool_objects import parse, read_list, read_object
from openclaw_rl.judge.reader.tool_texts import read_text


def read_tool_results(response: str, results: Sequence[str]) -> ReplyKind:
    """Read all results of one turn's calls; one wrong call makes the turn wrong."""
    call = read_calls(response)
    return worst(read_tool_result(result, call) for result in results)


def worst(kinds: Iterable[ReplyKind]) -> ReplyKind:
    """An error before what is unclear, and that before success."""
    found = set(kinds)
    return next((kind for kind in (ReplyKind.TOOL_ERROR, ReplyKind.UNCLEAR) if kind in found), ReplyKind.TOOL_SUCCESS)


def read_tool_result(result: str, call: Call) -> ReplyKind:
    """Read one result."""
    data = parse(result)
    if isinstance(data, dict):
        return read_object(data, call)
    return read_list(data, call) if isinstance(data, list) else read_text(result, call)
