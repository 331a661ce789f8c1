"""Reads what came after a response: a user's words, or the results of the tools that it called.

Of a result it reads whether the call failed, and whether that was the call's fault.
A result that only contains errors (a log file, a web page) is a success. A call that could not do its work is an error:
a wrong name or option, missing permission, a program that ends with an error, tests that fail. A failure from outside
(the network, a limit, a service, the user) is unclear.

Success needs evidence that fits the call: exit code 0, a word of success, a field that reports it, content for a call
that asks for it, or silence for a command that prints nothing on success. Without evidence, or with words that may
report a failure and are not in the call, the result is unclear.
"""

import asyncio
import json
import re
import threading
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from openclaw_rl.judge.rules.comparison import content_words
from openclaw_rl.judge.rules.grammar import all_grammars
from openclaw_rl.judge.rules.instructions import all_form_rules
from openclaw_rl.judge.rules.phrases import all_languages, normalise, shorten
from openclaw_rl.judge.rules.verdict import NEGATIVE, Reading, ReplyKind, read_user
from openclaw_rl.judge.rules.wishes import read_wish_as_complaint, split_wanted
from openclaw_rl.rendering.chat import content_text

#: Characters of a call and of a result that are read.
_HEAD, _TAIL = 2000, 1500
#: Characters of a result in which an error message begins.
_OPENING = 400
#: A longer result is content. Words that may report a failure are searched only in its last characters.
_SHORT, _LAST = 400, 160
_SHELL = re.compile(r"\b(?:exec|bash|sh|zsh|shell|terminal|command|cmd|run)\b|\b(?:run|execute)_")
_PROGRAM = re.compile(r"^(?:/\S{1,80}/)?([a-z][\w.+-]{1,30}): \S[^\n]*", re.M)
#: A call as JSON, which is read like `name(...`.
_JSON_CALL = re.compile(r'\{\s{0,4}"name":\s{0,4}"([\w.-]{1,60})",\s{0,4}"(?:arguments|parameters|input)":\s{0,4}\{')
#: Patterns of `tool_results.toml` that match only at the start of a line.
_LINE_PATTERNS = frozenset({"line", "report", "exit_code"})
#: Exit codes of programs that a time limit or a signal ended.
_ENDED_FROM_OUTSIDE = frozenset({124, 130, 134, 137, 139, 143, -6, -9, -11, -15})
#: Exit codes of the shell for a command that it cannot run.
_NOT_RUN = frozenset({126, 127})
#: Longer results are not parsed as JSON, because it would take too long.
_MAX_JSON = 20_000
#: Values of an object that are looked at.
_MAX_VALUES = 40
_EMPTY: tuple[Any, ...] = ([], {}, None, "")
#: Fields that report success, and what they hold after a failure.
_FLAGS = {"success": False, "ok": False, "succeeded": False, "isError": True, "is_error": True, "failed": True}
_JsonObject = dict[str, Any]
#: How libraries that want typed answers (Instructor, pydantic-ai) say that one does not fit.
RE_ASK = re.compile(
    r"Correct your JSON ONLY RESPONSE, based on the following errors:|Validation Errors? found:\s"
    r"|\d+ validation errors?:\s+```json|Your previous response failed the application's validation\b"
)
_compiling = threading.Lock()
_compiled = threading.Event()


def read_reply(request: str, response: str, next_state: Sequence[Mapping[str, Any]]) -> Reading:
    """Read the messages that came after `response`, which answered `request`.

    A user's words take precedence over tool results. Other roles are ignored.
    """
    said = [text for text in texts(next_state, "user") if text.strip()]
    if said:
        message = "\n".join(said)
        if RE_ASK.match(message):
            return Reading(ReplyKind.REJECTION)
        reading = read_user(request, response, message)
        if reading.kind is not ReplyKind.UNCLEAR:
            return reading
        before, wanted = split_wanted(message)
        if wanted and is_better_answer(wanted, before, request, response):
            return Reading(ReplyKind.CORRECTION)
        return read_wish_as_complaint(message, request, response)
    results = texts(next_state, "tool", "function")
    return Reading(read_tool_results(request, response, results) if results else ReplyKind.UNCLEAR)


def is_better_answer(wanted: str, before: str, request: str, response: str) -> bool:
    """Whether a text is the answer that a user wanted. After other words than a complaint it may be material.

    Without any words before it, it must be about what was asked or answered.
    """
    if before.strip():
        return read_user(request, response, before).kind in NEGATIVE
    return bool(content_words(wanted) & content_words(f"{request}\n{response}"))


def texts(messages: Sequence[Mapping[str, Any]], *roles: str) -> list[str]:
    """The texts of the messages in some roles."""
    return [content_text(message.get("content")) for message in messages if message.get("role") in roles]


async def ready() -> None:
    """Return when all phrases are compiled. The first caller has it done in a thread, so that no request waits."""
    if not _compiled.is_set():
        await asyncio.to_thread(_compile_once)


def _compile_once() -> None:
    """Compile all phrases, once. It takes seconds, in small steps, so that other threads go on."""
    with _compiling:
        if not _compiled.is_set():
            for grammar in all_grammars():
                grammar.compile()
            read_reply("", "run()", [{"role": "tool", "content": "Error: none"}])
            for language in all_languages():
                for phrases in language.signals.values():
                    phrases.compile()
            for rules in all_form_rules():
                for rule in rules.rules:
                    rule.when.compile()
            _compiled.set()


class Call(NamedTuple):
    """The properties of a response's tool calls."""

    shows: bool
    """They show a text, such as a file, so errors in the result may be part of that text."""
    writes: bool
    """They contain code or text, so compiler or test output is about it."""
    compares: bool
    """They run a program whose exit code 1 is a finding and no failure, such as `diff`."""
    checks: bool
    """They run tests, a compiler or a linter."""
    reports: bool
    """The request asks what such a check finds, and they change nothing, so its findings are no failure."""
    asks: bool
    """They ask for content, so content is a success."""
    silent: bool
    """They run a program that prints nothing on success."""
    remote: bool
    """They run a program that can fail because of the network."""
    text: str
    """The response that made them, normalised."""

    def runs(self, program: str) -> bool:
        """Whether they run a program of that name in a shell."""
        named = re.compile(rf"(?<![\w.-]){re.escape(program)}(?![\w=(-])")
        return bool(_SHELL.search(self.text) and named.search(self.text))


def read_tool_results(request: str, response: str, results: Sequence[str]) -> ReplyKind:
    """Read all results of one turn's calls. The worst counts: an error, then an unclear one."""
    call = read_calls(request, response)
    kinds = {read_tool_result(result, call) for result in results}
    worst = (kind for kind in (ReplyKind.TOOL_ERROR, ReplyKind.UNCLEAR) if kind in kinds)
    return next(worst, ReplyKind.TOOL_SUCCESS)


def read_calls(request: str, response: str) -> Call:
    """Read the calls of a response to a request."""
    made = _JSON_CALL.sub(r"\1(", shorten(response, _HEAD, _TAIL))
    writes, checks = found("writing", made), found("checking", made)
    shows = not writes and found("showing", made)
    return Call(
        shows=shows,
        writes=writes,
        compares=not writes and found("comparing", made),
        checks=checks,
        reports=checks and not writes and found("report_wanted", normalise(shorten(request))),
        asks=shows or found("asking", made),
        silent=found("silent", made),
        remote=found("remote", made),
        text=normalise(made),
    )


def read_tool_result(result: str, call: Call) -> ReplyKind:
    """Read one result."""
    data = parse_json(result)
    if isinstance(data, dict):
        return read_object(data, call)
    return read_list(data) if isinstance(data, list) else read_text(result, call)


def parse_json(result: str) -> Any:
    """The JSON in a result; None if there is none or it is too long."""
    if len(result) > _MAX_JSON or not result.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(result)
    except (ValueError, RecursionError):
        return None


def found(name: str, text: str) -> bool:
    """Whether a text contains a pattern of `tool_results.toml`."""
    return pattern(name).search(text) is not None


@cache
def pattern(name: str) -> re.Pattern[str]:
    """A compiled pattern of `tool_results.toml`."""
    listed = table()[name]
    joined = listed if isinstance(listed, str) else "|".join(listed)
    start = "^" if name in _LINE_PATTERNS else ""
    return re.compile(f"{start}(?:{joined})", re.IGNORECASE | re.MULTILINE)


@cache
def field_names(name: str) -> tuple[str, ...]:
    """A list of `tool_results.toml` with names or values of JSON fields."""
    return tuple(table()["fields"][name].split())


@cache
def table() -> dict[str, Any]:
    """The file of patterns, read once."""
    return tomllib.loads((files("openclaw_rl.judge.rules") / "tool_results.toml").read_text("utf-8"))


# Results that are JSON.


def read_list(data: list[Any]) -> ReplyKind:
    """Read a list. It is a success unless it is empty or lists failures."""
    objects = [each for each in data[:_MAX_VALUES] if isinstance(each, dict)]
    if any(has_failed(each) for each in objects):
        return fault(str(data)[:500]) if len(objects) == 1 else ReplyKind.UNCLEAR
    return ReplyKind.TOOL_SUCCESS if data and not all(each in _EMPTY for each in data) else ReplyKind.UNCLEAR


def read_object(data: _JsonObject, call: Call) -> ReplyKind:
    """Read an object by the fields that tools use to report success."""
    code = next((data[key] for key in field_names("exit_codes") if isinstance(data.get(key), int)), None)
    texts = (*field_names("errors"), *field_names("texts"))
    output = "\n".join(str(data[key])[:500] for key in texts if data.get(key))
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


def read_fields(data: _JsonObject, done: bool, call: Call) -> ReplyKind:
    """Read an object that reports no failure. Its state, content or texts may be evidence of success."""
    texts = [str(data[key]) for key in field_names("texts") if isinstance(data.get(key), str) and data[key]]
    readings = {read_text(text, call) for text in texts}
    if ReplyKind.TOOL_ERROR in readings:
        return ReplyKind.TOOL_ERROR
    no_content = (*field_names("remarks"), *field_names("states"))
    content = {key: value for key, value in data.items() if key not in no_content}
    filled = [value for value in content.values() if value not in _EMPTY and value is not False]
    if not done and not filled:
        return ReplyKind.TOOL_SUCCESS if readings == {ReplyKind.TOOL_SUCCESS} else ReplyKind.UNCLEAR
    values = list(content.values())[:_MAX_VALUES]
    short_values = [value for value in values if isinstance(value, str) and len(value) <= 60]
    doubtful = any(is_doubtful(text, call) for text in (*texts, *short_values))
    return ReplyKind.UNCLEAR if doubtful and not call.shows else ReplyKind.TOOL_SUCCESS


def is_done(data: _JsonObject) -> bool:
    """Whether an object reports success."""
    if any(data.get(key) is True for key in ("success", "ok", "succeeded", "done")):
        return True
    return data.get("code") == 0 or has_state(data, "done")


def has_state(data: _JsonObject, name: str) -> bool:
    """Whether a field for the state has one of the listed words."""
    return any(str(data.get(key)).casefold() in field_names(name) for key in field_names("states"))


def is_in_doubt(data: _JsonObject) -> bool:
    """Whether an object reports that something is unfinished, had no effect or was skipped."""
    if any(pattern("waiting").fullmatch(str(data.get(key, ""))) for key in field_names("states")):
        return True
    if any(value in (0, [], {}, None, False) and found("counting", key) for key, value in data.items()):
        return True
    return any(value and found("left_out", key) for key, value in data.items())


def has_failed(data: _JsonObject) -> bool:
    """Whether an object's own fields report a failure."""
    errors = (data[key] for key in field_names("errors") if data.get(key))
    if any(str(error).casefold() not in ("none", "ok", "0", "false") for error in errors):
        return True
    return any(data.get(key) is value for key, value in _FLAGS.items()) or has_state(data, "failed")


def http_status(data: _JsonObject) -> int:
    """The HTTP status that an object reports, or 0."""
    values = (data.get(key) for key in ("status_code", "statusCode", "http_status", "status", "code"))
    return next((n for n in values if isinstance(n, int) and not isinstance(n, bool) and 100 <= n < 600), 0)


# Results that are plain text.


def read_text(text: str, call: Call) -> ReplyKind:
    """Read a result that is plain text."""
    sample = shorten(text, _HEAD, _TAIL)
    if codes := list(pattern("exit_code").finditer(sample)):
        # The harness reports the exit code above or below the output. Between them the program speaks.
        code = codes[0 if codes[0].start() == 0 else -1]
        return read_exit_code(int(code["code"]), f"{sample[: code.start()]}\n{sample[code.end() :]}", call)
    sample = without_warnings(sample)
    opening = normalise(sample.lstrip()[:_OPENING])
    if call.reports and found("report", sample):
        return ReplyKind.UNCLEAR
    if pattern("transient_opening").match(opening) and not found("calls_fault", sample):
        return ReplyKind.UNCLEAR
    if begins_with_error(opening, call):
        return fault(sample)
    # Lines are no evidence if the call shows a text.
    if not call.shows and found("report", sample):
        return fault(sample) if call.writes or call.checks else ReplyKind.UNCLEAR
    if not call.shows and found("line", sample):
        return fault(sample)
    return ReplyKind.TOOL_SUCCESS if succeeds(sample, call) else ReplyKind.UNCLEAR


def without_warnings(output: str) -> str:
    """The output without the lines that only warn, except those that name a cause outside the call."""
    return pattern("warning").sub(lambda line: line[0] if found("transient", line[0]) else "", output)


def read_exit_code(code: int, output: str, call: Call) -> ReplyKind:
    """Read an exit code, and what was printed with it."""
    output = without_warnings(output)
    failed = begins_with_error(normalise(output.lstrip()[:_OPENING]), call)
    if code == 0:
        # A pipe has the exit code of its last command.
        hidden = failed or (not call.shows and found("line", output))
        return ReplyKind.UNCLEAR if hidden else ReplyKind.TOOL_SUCCESS
    if code in _NOT_RUN:
        return fault(output)
    if code in _ENDED_FROM_OUTSIDE or (call.remote and not found("calls_fault", output)):
        return ReplyKind.UNCLEAR
    if call.reports or (call.compares and not failed):
        return ReplyKind.UNCLEAR
    # Exit code 1 without output: the reason is unknown.
    return fault(output) if output.strip(" \t\n[]()") or code > 1 else ReplyKind.UNCLEAR


def begins_with_error(opening: str, call: Call) -> bool:
    """Whether a result begins like an error message. A shown text may do so too."""
    if pattern("opening").match(opening) or is_programs_complaint(opening, call):
        return True
    if call.shows:
        return False
    if pattern("usage").match(opening) and not found("help", call.text):
        return True
    return pattern("shape").match(opening.partition("\n")[0]) is not None


def is_programs_complaint(opening: str, call: Call) -> bool:
    """Whether a line begins with the name of the program that was run, as error messages do in any language."""
    if call.compares or call.checks:
        return False
    lines = [match for match in _PROGRAM.finditer(opening) if call.runs(match[1])]
    return bool(lines) and not any(found("harmless", match[0]) or found("done", match[0]) for match in lines)


def succeeds(sample: str, call: Call) -> bool:
    """Whether there is evidence of success, and none against it."""
    text = sample.strip()
    if not text or pattern("no_output").match(text):
        return call.silent
    if found("no_rows", text) or pattern("nothing").match(text) or (not call.shows and is_doubtful(text, call)):
        return False
    if call.shows:
        return "\n" in text or found("shown", text) or not is_doubtful(text, call)
    return call.asks or found("done", normalise(text[:_SHORT] + "\n" + text[-_LAST:]))


def is_doubtful(text: str, call: Call) -> bool:
    """Whether a result may report a failure: it has words of failure that are not in the call."""
    normalised = normalise(text[-_LAST:] if len(text) >= _SHORT else text)
    suspicious = pattern("suspicious").finditer(pattern("reassuring").sub("", normalised))
    words = (*pattern("transient").finditer(normalised), *suspicious)
    return any(match.group() not in call.text for match in words)


def fault(output: str) -> ReplyKind:
    """The kind of a failure: the call's fault, unless its cause lies outside. Failed tests are always its fault."""
    outside = found("transient", cause(output)) and not found("failed_tests", output)
    return ReplyKind.UNCLEAR if outside else ReplyKind.TOOL_ERROR


def cause(output: str) -> str:
    """The end of a traceback, which names the exception, without the lines of code; other output as it is."""
    _, traceback, after = output.rpartition("Traceback (most recent call last):")
    lines = after.splitlines() if traceback else []
    exception = next((n for n, line in enumerate(lines) if line.strip() and not line.startswith((" ", "\t"))), None)
    return output if exception is None else "\n".join(lines[exception:])
