"""What clients write into messages in a person's name, and what is left of a message without it.

The signs are OpenClaw's: it puts the time before what a person wrote, and a line about itself after the first message.
"""

import re

#: A context that OpenClaw adds to the end of a request and never keeps: neither the user's words nor history.
TRANSIENT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
#: When a message was written: `[Sun 2026-11-15 00:47 UTC] `.
TIMESTAMP = re.compile(r"\A\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d{4}-\d\d-\d\d \d\d:\d\d [^\]\n]{1,12}\] ")
#: Which session it is, on which machine: `Runtime: agent=main | … | sessionId=… | …`.
RUNTIME = re.compile(r"^Runtime: .*\bsessionId=([\w.:-]+).*$", re.MULTILINE)


def without_time(text: str) -> str:
    """A message without the time of writing."""
    return TIMESTAMP.sub("", text)


def user_words(text: str) -> str:
    """What a person wrote."""
    if text.startswith(TRANSIENT):
        return ""
    before, mark, line = text.rpartition("\nRuntime: ")
    # Only at the very end: whoever quotes such a line has written it.
    if mark and RUNTIME.fullmatch(f"Runtime: {line.rstrip()}"):
        text = before.rstrip()
    return without_time(text)
