"""Reads a tool's result that is plain text.

Success takes evidence that fits the call: exit code 0, a word of success, content for a call that asks for some,
silence for a command that says nothing when all is well. Without any, or with words that may tell of a failure and
that the call did not have, it is unclear.
"""

import re

from openclaw_rl.judge.reader.kinds import ReplyKind
from openclaw_rl.judge.reader.text import normalise, shorten
from openclaw_rl.judge.reader.tool_calls import HEAD, TAIL, Call, found, pattern

_OPENING = 400
_PROGRAM = re.compile(r"^(?:/\S{1,80}/)?([a-z][\w.+-]{1,30}): \S[^\n]*", re.M)
#: A longer result is content; what may tell of a failure is looked for in its last lines only.
_SHORT, _LAST = 400, 160
#: Ended from outside: by a time limit or by a signal.
_ENDED_FROM_OUTSIDE = frozenset({124, 130, 134, 137, 139, 143, -6, -9, -11, -15})
#: Said by the shell of a command that cannot be run at all.
_NOT_RUN = frozenset({126, 127})


def read_text(text: str, call: Call) -> ReplyKind:
    """Read a result that is plain text."""
    sample = shorten(text, HEAD, TAIL)
    if exit_code := pattern("exit_code").search(sample):
        told = f"{sample[: exit_code.start()]}\n{sample[exit_code.end() :]}"
        return read_exit_code(int(exit_code["code"]), told, call)
    plain = normalise(sample.lstrip()[:_OPENING])
    if pattern("transient_opening").match(plain):
        return ReplyKind.UNCLEAR
    if tells_of_error(plain, call):
        return fault(sample)
    return read_lines(sample, call)


def read_exit_code(code: int, told: str, call: Call) -> ReplyKind:
    """Read an exit code, and what was printed with it."""
    plain = normalise(told.lstrip()[:_OPENING])
    failed = tells_of_error(plain, call)
    if code == 0:
        # A pipe's code is that of its last command.
        hidden = failed or (not call.shows and found("line", told))
        return ReplyKind.UNCLEAR if hidden else ReplyKind.TOOL_SUCCESS
    if code in _NOT_RUN:
        return fault(told)
    if code in _ENDED_FROM_OUTSIDE or call.remote:
        return ReplyKind.UNCLEAR
    if call.tells and not failed:
        return ReplyKind.UNCLEAR
    # A code without a word: who knows what of.
    return fault(told) if told.strip(" \t\n[]()") or code > 1 else ReplyKind.UNCLEAR


def tells_of_error(plain: str, call: Call) -> bool:
    """Whether a result begins as messages of errors do; so may what was to be shown."""
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
    """Whether a line begins with the name of the program that was run: so programs complain, in any language."""
    if call.tells:
        return False
    lines = [match for match in _PROGRAM.finditer(plain) if call.runs(match[1])]
    return bool(lines) and not any(found("harmless", match[0]) or found("done", match[0]) for match in lines)


def read_lines(sample: str, call: Call) -> ReplyKind:
    """Read what is in the midst of a result: nothing to go by where the call shows what others wrote."""
    if not call.shows:
        if found("report", sample):
            return fault(sample) if call.writes else ReplyKind.UNCLEAR
        if found("line", sample):
            return fault(sample)
    return ReplyKind.TOOL_SUCCESS if succeeds(sample, call) else ReplyKind.UNCLEAR


def succeeds(sample: str, call: Call) -> bool:
    """Whether there is evidence of success, and nothing that speaks against it."""
    text = sample.strip()
    if not text or pattern("no_output").match(text):
        return call.silent
    if found("no_rows", text) or pattern("nothing").match(text) or (not call.shows and is_doubtful(text, call)):
        return False
    if call.shows:
        return "\n" in text or found("shown", text) or not is_doubtful(text, call)
    return call.asks or found("done", normalise(text[:_SHORT] + "\n" + text[-_LAST:]))


def is_doubtful(text: str, call: Call) -> bool:
    """Whether a result may tell of a failure: it has words for that which the call did not have."""
    if len(text) >= _SHORT:
        text = text[-_LAST:]
    if found("transient", text):
        return True
    plain = pattern("reassuring").sub("", normalise(text))
    return any(match.group() not in call.made for match in pattern("suspicious").finditer(plain))


def fault(told: str) -> ReplyKind:
    """Whose fault a failure was: the call's, unless what was told says otherwise."""
    return ReplyKind.UNCLEAR if found("transient", told) else ReplyKind.TOOL_ERROR
