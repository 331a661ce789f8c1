"""Which session a request belongs to, as the client says it in one of many ways."""

import re
from collections.abc import Mapping, Sequence
from uuid import uuid4

from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.rendering.chat import Message, content_text
from openclaw_rl.rendering.clients import RUNTIME

#: A counter that OpenClaw adds to a session's id; it rises when the history is cut, and the session goes on.
COUNTER = re.compile(r":\d+\Z")
#: Longer names are no names.
MAX_NAME = 256

Named = tuple[str, str]


def named_session(headers: Mapping[str, str], request: ChatRequest, messages: Sequence[Message]) -> Named | None:
    """The session's name and where it was found, the plainest sign first; None if the client gives no sign."""
    affinity = headers.get("x-session-affinity")
    signs = (
        (headers.get("x-session-id"), "header X-Session-Id"),
        (request.session_id, "field session_id"),
        (affinity and COUNTER.sub("", affinity), "header x-session-affinity"),
        (request.prompt_cache_key and COUNTER.sub("", request.prompt_cache_key), "field prompt_cache_key"),
        (runtime_session(messages), "OpenClaw's Runtime line"),
    )
    return next(((name[:MAX_NAME], source) for name, source in signs if name), None)


def runtime_session(messages: Sequence[Message]) -> str | None:
    """The id that OpenClaw writes into the first user message."""
    first = next((content_text(m.get("content")) for m in messages if m["role"] == "user"), "")
    # The client's own line is the last; the user may have pasted another.
    found: list[str] = RUNTIME.findall(first)
    return found[-1] if found else None


def new_session() -> Named:
    """A name for a conversation that nobody named."""
    return f"s-{uuid4().hex[:12]}", "history"
