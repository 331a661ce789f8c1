"""Chat requests that other wires are translated into."""

from typing import Any

from pydantic import Field, SkipValidation

from openclaw_rl.api.wire import ChatMessage, ChatRequest, ListOf


class TranslatedRequest(ChatRequest):
    """A request of another wire, whose translator has checked its messages."""

    messages: ListOf[ChatMessage] = Field(default_factory=list)
    translated: SkipValidation[list[dict[str, Any]]]
    details: SkipValidation[dict[str, Any]] = Field(default_factory=dict)
    """What is recorded with the answer, so that the wire can give it again."""

    def plain_messages(self) -> list[dict[str, Any]]:
        return self.translated


class TextRequest(ChatRequest):
    """A text that is continued as it is, without the chat template. Its only message is the text."""

    prompt: str | list[int]
    """As the client gave it: text, or token ids."""
