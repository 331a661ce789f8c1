"""Reads a tool result that is plain text.

Success needs evidence that fits the call: exit code 0, a word of success, content for a call that asks for it, or
silence for a command that prints nothing on success. Without evidence, or with words that may report a failure and are
not in the call, the result is unclear.
"""

import re

from openclaw_rl.judge.reader.kinds import ReplyKind
from openclaw_rl.judge.reader.text import normalise, shorten
from openclaw_rl.judge.reader.tool_calls import HEAD, TAIL, Call, found, pattern

_OPENING = 400
_PROGRAM = re.compile(r"^(?:/\S{1,80}/)?([a-z][\w.+-]{1,30}): \S[^\n]*", re.M)
#: A longer result is content. Words that may report a failure are searched only in its last characters.
_SHORT, _LAST = 400, 160
#: Exit codes of programs that a time limit or a signal ended.
_ENDED_FROM_OUTSIDE = frozenset({124, 130, 134, 137, 139, 143, -6, -9, -11, -15})
#: Exit codes of the shell for a command that it cannot run.
_NOT_RUN = frozenset({126, 127})


def read_text(text: str, call: Call) -> ReplyKind:
    """Read a result that is plain text."""
    sample = shorten(text, HEAD, TAIL)
    if exit_code := find_exit_code(sample):
        output = f"{sample[: exit_code.start()]}\n{sample[exit_code.end() :]}"
        return read_exit_code(int(exit_code["code"]), output, call)
    sample = without_warnings(sample)
    plain = normalise(sample.lstrip()[:_OPENING])
    if call.reports and found("report", sample):
        return ReplyKind.UNCLEAR
    if pattern("transient_opening").match(plain) and not found("own_fault", sample):
        return ReplyKind.UNCLEAR
    if tells_of_error(plain, call):
        return fault(sample)
    return read_lines(sample, call)


def find_exit_code(sample: str) -> re.Match[str] | None:
    """The exit code that the harness reports, above or below the output. Between them the program speaks."""
    codes = list(pattern("exit_code").finditer(sample))
    return codes[0 if codes[0].start() == 0 else -1] if codes else None


def without_warnings(output: str) -> str:
    """The output without the lines that only warn, except those that name a cause outside the call."""
    return pattern("warning").sub(lambda line: line[0] if found("transient", line[0]) else "", output)


def read_exit_code(code: int, output: str, call: Call) -> ReplyKind:
    """Read an exit code, and what was printed with it."""
    output = without_warnings(output)
    plain = normalise(output.lstrip()[:_OPENING])
    failed = tells_of_error(plain, call)
    if code == 0:
        # A pipe has the exit code of its last command.
        hidden = failed or (not call.shows and found("line", output))
        return ReplyKind.UNCLEAR if hidden else ReplyKind.TOOL_SUCCESS
    if code in _NOT_RUN:
        return fault(output)
    if code in _ENDED_FROM_OUTSIDE or (call.remote and not found("own_fault", output)):
        return ReplyKind.UNCLEAR
    if call.reports or (call.compares and not failed):
        return ReplyKind.UNCLEAR
    # Exit code 1 without output: the reason is unknown.
    return fault(output) if output.strip(" \t\n[]()") or code > 1 else ReplyKind.UNCLEAR


def tells_of_error(plain: str, call: Call) -> bool:
    """Whether a result begins like an error message. A shown text may do so too."""
    if pattern("opening").match(plain):
        return True
    if is_complaint(plain, call):
        return True
    if call.shows:
        return False
    if pattern("usage").match(plain) and not found("help", call.made):
        return True
    return pattern("shape").match(plain.partition("\n")[0]) is not None


def is_complaint(plain: str, call: Call) -> bool:
    """Whether a line begins with the name of the program that was run, as error messages do in any language."""
    if call.compares or call.checks:
        return False
    lines = [match for match in _PROGRAM.finditer(plain) if call.runs(match[1])]
    return bool(lines) and not any(found("harmless", match[0]) or found("done", match[0]) for match in lines)


def read_lines(sample: str, call: Call) -> ReplyKind:
    """Read the lines of a result. They are no evidence if the call shows a text."""
    if not call.shows:
        if found("report", sample):
            return fault(sample) if call.writes or call.checks else ReplyKind.UNCLEAR
        if found("line", sample):
            return fault(sample)
    return ReplyKind.TOOL_SUCCESS if succeeds(sample, call) else ReplyKind.UNCLEAR


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
    if len(text) >= _SHORT:
        text = text[-_LAST:]
    plain = normalise(text)
    return says_new("transient", plain, call) or says_new("suspicious", pattern("reassuring").sub("", plain), call)


def says_new(name: str, plain: str, call: Call) -> bool:
    """Whether a text has words of a pattern that are not in the call."""
    return any(match.group() not in call.made for match in pattern(name).finditer(plain))


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
