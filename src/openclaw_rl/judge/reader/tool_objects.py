"""Reads a tool result that is JSON, by the fields that report success or failure and by its content."""

import json
from typing import Any

from openclaw_rl.judge.reader.kinds import ReplyKind
from openclaw_rl.judge.reader.tool_calls import Call, found, pattern
from openclaw_rl.judge.reader.tool_texts import fault, is_doubtful, read_exit_code, read_text

#: Longer results are not parsed, because it would take too long.
_MAX_CHARACTERS = 20_000
#: Values of an object that are looked at.
_MAX_VALUES = 40
_FAILED_WORDS = frozenset(
    [
        "error",
        "failed",
        "failure",
        "fail",
        "exception",
        "invalid",
        "not_found",
        "rejected",
        "bad_request",
        "invalid_argument",
        "invalid_request",
        "validation_error",
        "err",
        "fatal",
        "notfound",
        "badrequest",
    ]
)
_DONE_WORDS = frozenset(
    ["ok", "success", "succeeded", "successful", "completed", "complete", "done", "created", "updated", "saved", "sent"]
)
_FLAGS = {"success": False, "ok": False, "succeeded": False, "isError": True, "is_error": True, "failed": True}
_ERRORS = [
    "error",
    "errors",
    "err",
    "exception",
    "exceptions",
    "fault",
    "error_message",
    "errorMessage",
    "error_msg",
    "errmsg",
    "error_code",
    "errorCode",
    "errcode",
    "errno",
    "fehler",
    "erreur",
    "erro",
    "errore",
    "falla",
    "错误",
    "ошибка",
    "エラー",
    "error_type",
    "errorType",
    "traceback",
    "stacktrace",
    "stack_trace",
    "stack",
    "validation_errors",
]
_EXIT_KEYS = ("exit_code", "exitCode", "returncode", "return_code", "exit_status", "exitStatus")
_TEXT_KEYS = [
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
    "title",
]
_STATES = ("status", "state", "result", "outcome", "type", "code", "level")
_REMARKS = frozenset({"message", "detail", "details", "msg", "reason", "description", "title", "note", "info"})
_EMPTY: tuple[Any, ...] = ([], {}, None, "")
_Json = dict[str, Any]


def parse(result: str) -> Any:
    """The JSON in a result; None if there is none or it is too long."""
    if len(result) > _MAX_CHARACTERS or not result.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(result)
    except (ValueError, RecursionError):
        return None


def read_list(data: list[Any], call: Call) -> ReplyKind:
    """Read a list. It is a success unless it is empty or lists failures."""
    objects = [each for each in data[:_MAX_VALUES] if isinstance(each, dict)]
    if any(has_failed(each) for each in objects):
        return fault(str(data)[:500]) if len(objects) == 1 else ReplyKind.UNCLEAR
    return ReplyKind.TOOL_SUCCESS if data and not all(each in _EMPTY for each in data) else ReplyKind.UNCLEAR


def read_object(data: _Json, call: Call) -> ReplyKind:
    """Read an object by the fields that tools use to report success."""
    code = next((data[key] for key in _EXIT_KEYS if isinstance(data.get(key), int)), None)
    output = "\n".join(str(data[key])[:500] for key in (*_ERRORS, *_TEXT_KEYS) if data.get(key))
    if code is not None:
        return read_exit_code(int(code), output, call)
    status = http_status(data)
    if status >= 400:
        return fault(f"{status} {output}")
    inner = [value for value in data.values() if isinstance(value, dict)][:_MAX_VALUES]
    if has_failed(data) or any(has_failed(each) for each in inner):
        return fault(output or str(data)[:500])
    if any(is_in_doubt(each) for each in (data, *inner)):
        return ReplyKind.UNCLEAR
    return read_fields(data, bool(status) or is_done(data), call)


def read_fields(data: _Json, done: bool, call: Call) -> ReplyKind:
    """Read an object that reports no failure. Its state, content or texts may be evidence of success."""
    texts = [str(data[key]) for key in _TEXT_KEYS if isinstance(data.get(key), str) and data[key]]
    readings = {read_text(text, call) for text in texts}
    if ReplyKind.TOOL_ERROR in readings:
        return ReplyKind.TOOL_ERROR
    content = {key: value for key, value in data.items() if key not in _REMARKS and key not in _STATES}
    filled = [value for value in content.values() if value not in _EMPTY and value is not False]
    if not done and not filled:
        return ReplyKind.TOOL_SUCCESS if readings == {ReplyKind.TOOL_SUCCESS} else ReplyKind.UNCLEAR
    doubtful = any(is_doubtful(text, call) for text in (*texts, *short_strings(content)))
    return ReplyKind.UNCLEAR if doubtful and not call.shows else ReplyKind.TOOL_SUCCESS


def short_strings(data: _Json) -> list[str]:
    """The values that are short strings, such as states."""
    return [value for value in list(data.values())[:_MAX_VALUES] if isinstance(value, str) and len(value) <= 60]


def is_done(data: _Json) -> bool:
    """Whether an object reports success."""
    flags = ("success", "ok", "succeeded", "done")
    if any(data.get(key) is True for key in flags):
        return True
    return data.get("code") == 0 or any(str(data.get(key)).casefold() in _DONE_WORDS for key in _STATES)


def is_in_doubt(data: _Json) -> bool:
    """Whether an object reports that something is unfinished or had no effect."""
    if any(pattern("waiting").fullmatch(str(data.get(key, ""))) for key in _STATES):
        return True
    counts = [key for key, value in data.items() if value in (0, [], {}, None, False) and found("counting", key)]
    # Some items were skipped.
    return bool(counts) or any(value and found("left_out", key) for key, value in data.items())


def has_failed(data: _Json) -> bool:
    """Whether an object's own fields report a failure."""
    if any(data.get(key) and str(data[key]).casefold() not in ("none", "ok", "0", "false") for key in _ERRORS):
        return True
    if any(data.get(key) is value for key, value in _FLAGS.items()):
        return True
    return any(str(data.get(key)).casefold() in _FAILED_WORDS for key in _STATES)


def http_status(data: _Json) -> int:
    """The HTTP status that an object reports, or 0."""
    keys = ("status_code", "statusCode", "http_status", "status", "code")
    numbers = (data.get(key) for key in keys)
    return next((n for n in numbers if isinstance(n, int) and not isinstance(n, bool) and 100 <= n < 600), 0)
