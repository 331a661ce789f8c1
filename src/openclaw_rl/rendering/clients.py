"""Removes what clients add to a user's message, so that only the user's own words are left.

The patterns are OpenClaw's: it puts the time before a user's message, and a line about itself after the first one.
"""

import re

#: Begins a message that OpenClaw adds to the end of one request and does not keep in its history.
TRANSIENT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
#: The time when a message was written: `[Sun 2026-11-15 00:47 UTC] `.
TIMESTAMP = re.compile(r"\A\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d{4}-\d\d-\d\d \d\d:\d\d [^\]\n]{1,12}\] ")
#: Names the session and the machine: `Runtime: agent=main | … | sessionId=… | …`.
RUNTIME = re.compile(r"^Runtime: .*\bsessionId=([\w.:-]+).*$", re.MULTILINE)


def without_time(text: str) -> str:
    """A message without the time when it was written."""
    return TIMESTAMP.sub("", text)


def user_words(text: str) -> str:
    """The words of a user message that the user wrote."""
    if text.startswith(TRANSIENT):
        return ""
    before, separator, line = text.rpartition("\nRuntime: ")
    # Only at the very end: anywhere else, the user has quoted such a line.
    if separator and RUNTIME.fullmatch(f"Runtime: {line.rstrip()}"):
        text = before.rstrip()
    return without_time(text)
