"""Reads what tools returned: whether the call went wrong, and whether that was the call's fault.

A result that only tells of errors (a log that was read, a page that was found) is a success. What is no fault of the
call (the network, a limit, missing rights) is unclear.
"""

import json
import re
import tomllib
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from openclaw_rl.judge.reader.kinds import ReplyKind
from openclaw_rl.judge.reader.text import normalise, shorten

_HEAD, _TAIL = 2000, 1500
_LONGEST_JSON = 20_000
_FAILED_WORDS = frozenset({"error", "failed", "failure", "fail", "exception", "invalid", "not_found", "rejected"})
_FLAGS = {"success": False, "ok": False, "succeeded": False, "isError": True, "is_error": True, "failed": True}
_EXIT_KEYS = ("exit_code", "exitCode", "returncode", "return_code", "exit_status", "exitStatus")
_TEXT_KEYS = (
    "stderr",
    "output",
    "stdout",
    "content",
    "result",
    "text",
    "message",
    "detail",
    "details",
    "msg",
    "reason",
    "description",
)
_SHORT = 400
#: Ended from outside: by a time limit or by a signal.
_ENDED_FROM_OUTSIDE = frozenset({124, 130, 137, 143, -9, -15})


class Call(NamedTuple):
    """What is known of the calls from the response that made them."""

    shows: bool
    """They show what somebody wrote, such as a file; what the result says is about that."""
    writes: bool
    """They carry code or text of their own; what a compiler or test says is about that."""
    tells: bool
    """They run something that says with exit code 1 what it found."""
    made: str = ""
    """The response that made them."""


@cache
def pattern(name: str) -> re.Pattern[str]:
    """A pattern of `phrases/tools.toml`; those that are to be found on some line begin a line."""
    found = table()[name]
    joined = found if isinstance(found, str) else "|".join(found)
    start = "^" if name in ("line", "report", "exit_code") else ""
    return re.compile(f"{start}(?:{joined})", re.IGNORECASE | re.MULTILINE)


@cache
def table() -> dict[str, Any]:
    """The file of patterns, read once."""
    return tomllib.loads((files("openclaw_rl.judge.reader") / "phrases" / "tools.toml").read_text("utf-8"))


def read_tool_results(response: str, results: Sequence[str]) -> ReplyKind:
    """Read all results of one turn's calls; one wrong call makes the turn wrong."""
    made = shorten(response, _HEAD, _TAIL)
    writes = pattern("writing").search(made) is not None
    shows = not writes and pattern("showing").search(made) is not None
    call = Call(shows, writes, not writes and pattern("telling").search(made) is not None, normalise(made))
    return worst(read_tool_result(result, call) for result in results)


def worst(kinds: Iterable[ReplyKind]) -> ReplyKind:
    """An error before what is unclear, and that before success."""
    found = set(kinds)
    return next((kind for kind in (ReplyKind.TOOL_ERROR, ReplyKind.UNCLEAR) if kind in found), ReplyKind.TOOL_SUCCESS)


def read_tool_result(result: str, call: Call) -> ReplyKind:
    """Read one result."""
    data = parse(result)
    return read_object(data, call) if isinstance(data, dict) else read_text(result, call)


def parse(result: str) -> Any:
    """The JSON in a result, or None; what is long is not worth the time."""
    if len(result) > _LONGEST_JSON or not result.lstrip().startswith("{"):
        return None
    try:
        return json.loads(result)
    except (ValueError, RecursionError):
        return None


def read_object(data: dict[str, Any], call: Call) -> ReplyKind:
    """Read a JSON object by the fields that tools use to report success."""
    code = next((data[key] for key in _EXIT_KEYS if isinstance(data.get(key), int)), None)
    told = " ".join(str(data[key])[:500] for key in ("error", "errors", *_TEXT_KEYS) if data.get(key))
    if code is not None:
        return read_exit_code(int(code), told, call)
    if status := http_status(data):
        return ReplyKind.TOOL_SUCCESS if status < 400 else fault(f"{status} {told}")
    if has_failed(data):
        return fault(told or str(data)[:500])
    if any(pattern("waiting").fullmatch(str(data.get(key, ""))) for key in ("status", "state", "result")):
        return ReplyKind.UNCLEAR
    if data and all(value in ([], {}, None, 0, "") for value in data.values()):
        return ReplyKind.UNCLEAR
    return worst(read_text(data[key], call) for key in _TEXT_KEYS if isinstance(data.get(key), str) and data[key])


def has_failed(data: dict[str, Any]) -> bool:
    """Whether an object's own fields say that it reports a failure."""
    if data.get("error") or data.get("errors") or data.get("exception"):
        return True
    if any(data.get(key) is value for key, value in _FLAGS.items()):
        return True
    return any(str(data.get(key)).casefold() in _FAILED_WORDS for key in ("status", "type", "result", "outcome"))


def http_status(data: dict[str, Any]) -> int:
    """The HTTP status that an object reports, or 0."""
    found = (data.get(key) for key in ("status_code", "statusCode", "http_status", "status", "code"))
    return next((n for n in found if isinstance(n, int) and not isinstance(n, bool) and 100 <= n < 600), 0)


def read_exit_code(code: int, told: str, call: Call) -> ReplyKind:
    """Read an exit code, and what was printed with it."""
    if code == 0:
        return ReplyKind.TOOL_SUCCESS
    if code in _ENDED_FROM_OUTSIDE or (code == 1 and call.tells):
        return ReplyKind.UNCLEAR
    return fault(told)


def read_text(text: str, call: Call) -> ReplyKind:
    """Read a result that is plain text."""
    sample = shorten(text, _HEAD, _TAIL)
    plain = normalise(sample.lstrip()[:400])
    if exit_code := pattern("exit_code").search(sample):
        return read_exit_code(int(exit_code["code"]), sample, call)
    if pattern("transient_opening").match(plain) or (call.shows and pattern("nothing").match(plain or "none")):
        return ReplyKind.UNCLEAR
    if pattern("opening").match(plain):
        return fault(sample)
    return read_lines(sample, call)


def read_lines(sample: str, call: Call) -> ReplyKind:
    """Read what is in the midst of a result: nothing to go by where the call shows what others wrote."""
    if call.shows:
        return ReplyKind.TOOL_SUCCESS
    if pattern("report").search(sample):
        return fault(sample) if call.writes else ReplyKind.UNCLEAR
    if pattern("line").search(sample):
        return fault(sample)
    return ReplyKind.UNCLEAR if is_unsure(sample, call) else ReplyKind.TOOL_SUCCESS


def is_unsure(sample: str, call: Call) -> bool:
    """Whether a short result may tell of a failure: nothing came of it, or it has words that the call did not have."""
    if len(sample) >= _SHORT:
        return False
    if pattern("nothing").match(sample or "-") or pattern("transient").search(sample):
        return True
    plain = pattern("reassuring").sub("", normalise(sample))
    return any(match.group() not in call.made for match in pattern("suspicious").finditer(plain))


def fault(told: str) -> ReplyKind:
    """Whose fault a failure was: the call's, unless what was told says otherwise."""
    return ReplyKind.UNCLEAR if pattern("transient").search(told) else ReplyKind.TOOL_ERROR
