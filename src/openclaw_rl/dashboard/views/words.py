"""Messages and states in words."""

import json
from collections.abc import Mapping
from typing import Any

from openclaw_rl.rendering.chat import content_text
from openclaw_rl.types import State

#: What a turn's state is called on a page.
STATES = {
    State.CAPTURED: "to be scored",
    State.AWAITING: "waiting for what comes next",
    State.READY: "to be judged",
    State.JUDGED: "judged",
    State.BATCHED: "in training",
    State.APPLIED: "learned from",
    State.DROPPED: "not trained on",
}


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
