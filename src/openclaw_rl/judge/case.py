"""A turn as a judge sees it: what was asked, what was answered, what came next."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.rendering.chat import content_text, spell_out_message, template_message
from openclaw_rl.rendering.clients import user_words
from openclaw_rl.types import Feedback, StoredTurn


@dataclass(frozen=True, slots=True)
class Case:
    """What is put before a judge."""

    turn: int
    request: str
    """What led to the response: the user's words, and tools' results since the response before it."""
    response: str
    """Its calls written out."""
    next_state: Sequence[Mapping[str, Any]]
    feedback: Sequence[Feedback]

    @property
    def outcome(self) -> str:
        """What came next, as text."""
        return "\n".join(content_text(message.get("content")) for message in self.next_state)

    @classmethod
    def of(cls, turn: StoredTurn) -> "Case":
        return cls(turn.number, asked(turn.messages), in_words(turn.message), turn.next_state or (), turn.feedback)


def asked(messages: Sequence[dict[str, Any]]) -> str:
    """The last request of a conversation: all that the user and tools said since the last response."""
    said = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    new = [m for m in messages[said[-1] + 1 if said else 0 :] if m["role"] in ("user", "tool")]
    words = [said_in(message) for message in new]
    if new and all(message["role"] == "tool" for message in new):
        # A tool's result alone says nothing of what was wanted.
        words.insert(0, last_user_words(messages))
    return "\n".join(filter(None, words))


def last_user_words(messages: Sequence[dict[str, Any]]) -> str:
    said = (said_in(message) for message in reversed(messages) if message["role"] == "user")
    return next(filter(None, said), "")


def said_in(message: dict[str, Any]) -> str:
    """A message's text; of a user's, what the person wrote."""
    text = content_text(message.get("content"))
    return user_words(text) if message["role"] == "user" else text


def in_words(message: dict[str, Any]) -> str:
    """An assistant's message as text, its tool calls included."""
    return content_text(spell_out_message(template_message(message))["content"])
