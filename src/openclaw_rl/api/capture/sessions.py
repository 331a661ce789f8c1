"""Which session a request belongs to, according to the client."""

import re
from collections.abc import Mapping, Sequence
from uuid import uuid4

from openclaw_rl.api.wire import MAX_NAME_CHARACTERS, ChatRequest
from openclaw_rl.rendering.chat import Message, content_text
from openclaw_rl.rendering.clients import RUNTIME

#: OpenClaw adds a counter to a session's id. It rises when the history is cut; the session stays the same.
COUNTER = re.compile(r":\d+\Z")
#: A session's name, and where the name was found.
NamedSession = tuple[str, str]


def named_session(
    headers: Mapping[str, str], request: ChatRequest, messages: Sequence[Message], *, in_episode: bool = False
) -> NamedSession | None:
    """The session that the client names, the most explicit way first; None if it names none. Long names are cut."""
    if in_episode and (exact := headers.get("x-session-id")):
        # Environments number their episodes; what looks like OpenClaw's counter is part of the name.
        return exact[:MAX_NAME_CHARACTERS], "header X-Session-Id"
    candidates = (
        (without_counter(headers.get("x-session-id")), "header X-Session-Id"),
        (request.session_id, "field session_id"),
        (headers.get("x-claude-code-session-id"), "header X-Claude-Code-Session-Id"),
        (without_counter(headers.get("x-session-affinity")), "header x-session-affinity"),
        (without_counter(request.prompt_cache_key), "field prompt_cache_key"),
        (runtime_session(messages), "OpenClaw's Runtime line"),
    )
    return next(((name[:MAX_NAME_CHARACTERS], source) for name, source in candidates if name), None)


def possible_names(given: str) -> list[str]:
    """The sessions that a client may mean by a name: the one of this name, and the one without OpenClaw's counter."""
    return list(dict.fromkeys(name[:MAX_NAME_CHARACTERS] for name in (given, without_counter(given))))


def without_counter(name: str | None) -> str:
    return COUNTER.sub("", name or "")


def runtime_session(messages: Sequence[Message]) -> str | None:
    """The id that OpenClaw writes into the first user message."""
    first = next((content_text(m.get("content")) for m in messages if m["role"] == "user"), "")
    # The client's own line is the last one; the user may have pasted another.
    ids: list[str] = RUNTIME.findall(first)
    return ids[-1] if ids else None


def new_session() -> NamedSession:
    """A new name, for a conversation that the client did not name."""
    return f"s-{uuid4().hex[:12]}", "history"
