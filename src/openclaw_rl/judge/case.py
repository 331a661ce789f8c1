"""A turn as a judge sees it: what was asked, what was answered, what came next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.rendering.chat import content_text, spell_out_message, template_message
from openclaw_rl.rendering.clients import message_words
from openclaw_rl.types import Feedback, StoredTurn


@dataclass(frozen=True, slots=True)
class Case:
    """What a judge is shown of a turn."""

    turn: int
    request: str
    """The user's words and the tools' results since the response before."""
    response: str
    """The response as text, with its tool calls written out."""
    next_state: Sequence[Mapping[str, Any]]
    feedback: Sequence[Feedback]
    in_episode: bool = False
    """Whether the turn is part of an episode, which its environment has rewarded."""

    @property
    def outcome(self) -> str:
        """What came next, as text."""
        return "\n".join(content_text(message.get("content")) for message in self.next_state)

    @classmethod
    def of(cls, turn: StoredTurn) -> "Case":
        return cls(
            turn.number,
            last_request(turn.messages),
            as_text(turn.message),
            turn.next_state or (),
            turn.feedback,
            turn.episode is not None,
        )


def last_request(messages: Sequence[dict[str, Any]]) -> str:
    """Everything that the user and tools said since the last response."""
    responses = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    new = [m for m in messages[responses[-1] + 1 if responses else 0 :] if m["role"] in ("user", "tool")]
    words = [message_words(message) for message in new]
    if new and all(message["role"] == "tool" for message in new):
        # A tool's result alone does not say what the user wanted.
        words.insert(0, last_user_words(messages))
    return "\n".join(filter(None, words))


def last_user_words(messages: Sequence[dict[str, Any]]) -> str:
    texts = (message_words(message) for message in reversed(messages) if message["role"] == "user")
    return next(filter(None, texts), "")


def as_text(message: dict[str, Any]) -> str:
    """An assistant's message as text, including its tool calls."""
    return content_text(spell_out_message(template_message(message))["content"])
