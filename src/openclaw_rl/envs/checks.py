"""Checks and bounds what an environment returns. Whatever the driver cannot use is a failure of the environment."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.envs.base import EnvFailed, Message, Outcome, Step, Tool

#: Longer texts of an environment are cut, with a note.
MAX_TEXT_CHARACTERS = 20_000
#: Longer hints are cut.
MAX_HINT_CHARACTERS = 4_000
#: Most messages in one step.
MAX_MESSAGES = 64
#: Largest reward, and smallest with a minus: what the server takes.
MAX_REWARD = 1e6
#: Roles that an environment speaks in. Examples of answers may stand in the first messages.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool"})


def checked_messages(what: str, value: Any) -> list[Message]:
    """Messages that the server can read, with long texts cut. Raises EnvFailed."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise EnvFailed(f"{what} gave {kind(value)} instead of a list of messages")
    if len(value) > MAX_MESSAGES:
        raise EnvFailed(f"{what} gave {len(value)} messages; at most {MAX_MESSAGES} are allowed")
    messages = [checked_message(what, message) for message in value]
    check_json(f"{what} gave a message", messages)
    return messages


def checked_message(what: str, message: Any) -> Message:
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(role, str) or role not in ROLES:
        raise EnvFailed(f"{what} gave {kind(message)} instead of a message with a role")
    content = message.get("content")
    if isinstance(content, str):
        return {**message, "content": cut(content)}
    if isinstance(content, list):
        return {**message, "content": [cut_part(part) for part in content]}
    if content is not None:
        raise EnvFailed(f"{what} gave a message whose content is {kind(content)}")
    return dict(message)


def checked_step(value: Any) -> Step:
    """A step with messages that can be sent and a reward that is a number. Raises EnvFailed."""
    if not isinstance(value, Step):
        raise EnvFailed(f"step gave {kind(value)} instead of a Step")
    messages = checked_messages("step", value.messages)
    if not messages and not value.done:
        raise EnvFailed("step gave no message, though the episode is not done")
    if value.reward is not None:
        check_number("step", value.reward)
    return Step(messages, value.reward, checked_hint("step", value.hint), bool(value.done))


def checked_outcome(value: Any) -> Outcome:
    """An outcome whose reward is a finite number. Raises EnvFailed."""
    if not isinstance(value, Outcome):
        raise EnvFailed(f"outcome gave {kind(value)} instead of an Outcome")
    check_number("outcome", value.reward)
    return Outcome(float(value.reward), bool(value.solved), checked_hint("outcome", value.hint))


def checked_tools(value: Any) -> list[Tool]:
    """Tools in OpenAI's shape; the server checks the rest. Raises EnvFailed."""
    if not isinstance(value, Sequence) or not all(isinstance(tool, Mapping) for tool in value):
        raise EnvFailed(f"tools is {kind(value)} instead of a list of tools")
    check_json("tools has a tool", list(value))
    return list(value)


def check_json(what: str, value: Any) -> None:
    """Refuse what cannot be sent."""
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvFailed(f"{what} that is not JSON: {error}") from None


def check_number(what: str, value: Any) -> None:
    """Refuse a reward that the server does not take, such as NaN."""
    if not isinstance(value, int | float) or not -MAX_REWARD <= value <= MAX_REWARD:
        raise EnvFailed(
            f"{what} gave the reward {value!r:.40}, which is not a finite number from {-MAX_REWARD:g} to {MAX_REWARD:g}"
        )


def checked_hint(what: str, hint: Any) -> str:
    if not isinstance(hint, str):
        raise EnvFailed(f"{what} gave {kind(hint)} as a hint")
    return cut(hint, MAX_HINT_CHARACTERS)


def cut_part(part: Any) -> Any:
    """One part of a message's content, with its text cut."""
    if isinstance(part, Mapping) and isinstance(part.get("text"), str):
        return {**part, "text": cut(part["text"])}
    return part


def cut(text: str, limit: int = MAX_TEXT_CHARACTERS) -> str:
    """A text that is at most about `limit` characters long: beginning and end, and how much is missing between.

    Characters that UTF-8 does not have, halves of UTF-16 pairs, become question marks.
    """
    text = text.encode("utf-8", "replace").decode()
    if len(text) <= limit:
        return text
    missing = len(text) - limit
    return f"{text[: limit // 2]}\n[… {missing} characters cut …]\n{text[-(limit - limit // 2) :]}"


def kind(value: Any) -> str:
    return "nothing" if value is None else f"a {type(value).__name__}"
