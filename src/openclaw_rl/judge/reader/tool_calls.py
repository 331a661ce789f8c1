"""Reads tool calls in a response. They decide what their result is evidence of."""

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from openclaw_rl.judge.reader.text import normalise, shorten

HEAD, TAIL = 2000, 1500
_SHELL = re.compile(r"\b(?:exec|bash|sh|zsh|shell|terminal|command|cmd|run)\b|\b(?:run|execute)_")
#: A call as JSON, which is read like `name(...`.
_JSON_CALL = re.compile(r'\{\s{0,4}"name":\s{0,4}"([\w.-]{1,60})",\s{0,4}"(?:arguments|parameters|input)":\s{0,4}\{')
_LINES = frozenset({"line", "report", "exit_code"})


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
    made: str = ""
    """The response that made them, normalised."""

    def runs(self, program: str) -> bool:
        """Whether they run a program of that name in a shell."""
        named = re.compile(rf"(?<![\w.-]){re.escape(program)}(?![\w=(-])")
        return bool(_SHELL.search(self.made) and named.search(self.made))


def read_calls(request: str, response: str) -> Call:
    """Read the calls of a response to a request."""
    made = _JSON_CALL.sub(r"\1(", shorten(response, HEAD, TAIL))
    plain = normalise(made)
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
        made=plain,
    )


def found(name: str, text: str) -> bool:
    """Whether a text contains a pattern of `phrases/tools.toml`."""
    return pattern(name).search(text) is not None


@cache
def pattern(name: str) -> re.Pattern[str]:
    """A compiled pattern of `phrases/tools.toml`. Some patterns match only at the start of a line."""
    listed = table()[name]
    joined = listed if isinstance(listed, str) else "|".join(listed)
    start = "^" if name in _LINES else ""
    return re.compile(f"{start}(?:{joined})", re.IGNORECASE | re.MULTILINE)


@cache
def table() -> dict[str, Any]:
    """The file of patterns, read once."""
    return tomllib.loads((files("openclaw_rl.judge.reader") / "phrases" / "tools.toml").read_text("utf-8"))
