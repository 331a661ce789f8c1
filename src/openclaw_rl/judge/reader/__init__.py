"""Reads a next state without a model: what people say when they are content, correct, reject, repeat or move on.

Deterministic and cheap (well under a millisecond). Abstains (`ReplyKind.UNCLEAR`) rather than guess.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.judge.reader.kinds import Reading, ReplyKind
from openclaw_rl.judge.reader.tools import read_tool_results
from openclaw_rl.judge.reader.users import read_user
from openclaw_rl.rendering.chat import content_text

__all__ = ["Reading", "ReplyKind", "read_reply"]

_TOOL_ROLES = frozenset({"tool", "function"})


def read_reply(request: str, response: str, next_state: Sequence[Mapping[str, Any]]) -> Reading:
    """Read what came after `response`, which answered `request`; `next_state` are messages with role and content.

    A user's words decide over what tools returned; other roles say nothing.
    """
    said = [text for text in texts(next_state, frozenset({"user"})) if text.strip()]
    if said:
        return read_user(request, response, "\n".join(said))
    results = texts(next_state, _TOOL_ROLES)
    return Reading(read_tool_results(response, results) if results else ReplyKind.UNCLEAR)


def texts(messages: Sequence[Mapping[str, Any]], roles: frozenset[str]) -> list[str]:
    """What was said in some roles."""
    return [content_text(message.get("content")) for message in messages if message.get("role") in roles]
