"""Messages in words."""

import json
from collections.abc import Mapping
from typing import Any

from openclaw_rl.rendering.chat import content_text


def spoken(message: Mapping[str, Any]) -> str:
    """A message in words, with its tool calls."""
    lines = [f"calls {call.get('name')} {call.get('arguments')}" for call in calls_of(message)]
    return "\n".join(filter(None, [text_of(message), *lines]))


def calls_of(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls") or ()]


def text_of(message: Mapping[str, Any]) -> str:
    try:
        return content_text(message.get("content"))
    except (KeyError, TypeError):
        return json.dumps(message.get("content"), ensure_ascii=False)
