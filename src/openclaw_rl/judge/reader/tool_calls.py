"""What is known of tool calls from the response that made them: it decides what a result is evidence of."""

import re
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from openclaw_rl.judge.reader.text import normalise, shorten

HEAD, TAIL = 2000, 1500
_LINES = frozenset({"line", "report", "exit_code"})


class Call(NamedTuple):
    """What is known of the calls."""

    shows: bool
    """They show what somebody wrote, such as a file; what the result says is about that."""
    writes: bool
    """They carry code or text of their own; what a compiler or test says is about that."""
    tells: bool
    """They run something that says with its exit code what it found."""
    asks: bool
    """They ask for something, so that content is what they wanted."""
    silent: bool
    """They run what says nothing when all is well."""
    remote: bool
    """They run what fails with the network, too."""
    made: str = ""
    """The response that made them, normalised."""

    def runs(self, program: str) -> bool:
        """Whether they run a program of that name."""
        return re.search(rf"(?<![\w.-]){re.escape(program)}(?![\w=(-])", self.made) is not None


def read_calls(response: str) -> Call:
    """Read the calls of a response."""
    made = shorten(response, HEAD, TAIL)
    plain = normalise(made)
    writes, tells = found("writing", made), found("telling", made)
    shows = not writes and found("showing", made)
    asks = shows or found("asking", made)
    return Call(shows, writes, tells and not writes, asks, found("silent", made), found("remote", made), plain)


def found(name: str, text: str) -> bool:
    """Whether a pattern is anywhere in a text."""
    return pattern(name).search(text) is not None


@cache
def pattern(name: str) -> re.Pattern[str]:
    """A pattern of `phrases/tools.toml`; those that are to be found on some line begin a line."""
    listed = table()[name]
    joined = listed if isinstance(listed, str) else "|".join(listed)
    start = "^" if name in _LINES else ""
    return re.compile(f"{start}(?:{joined})", re.IGNORECASE | re.MULTILINE)


@cache
def table() -> dict[str, Any]:
    """The file of patterns, read once."""
    return tomllib.loads((files("openclaw_rl.judge.reader") / "phrases" / "tools.toml").read_text("utf-8"))
