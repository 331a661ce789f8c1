"""What a next state can be, and what the reader makes of one."""

from dataclasses import dataclass
from enum import StrEnum


class ReplyKind(StrEnum):
    """What a next state is."""

    ACKNOWLEDGEMENT = "acknowledgement"
    """Content with the response, in words: +1."""
    CORRECTION = "correction"
    """Says what was wrong or what should have been: -1, and the hint is what was said."""
    REJECTION = "rejection"
    """Says that it was wrong or useless, but not what would be right: -1, no hint."""
    REPETITION = "repetition"
    """Asks the same again, in the same or other words: -1, no hint."""
    CHANGE_REQUEST = "change_request"
    """Wants the same otherwise (shorter, in another form, with an addition): -1, and the hint is what was said."""
    MOVING_ON = "moving_on"
    """Takes the next step, saying so: +1."""
    TOOL_SUCCESS = "tool_success"
    TOOL_ERROR = "tool_error"
    """The call itself was wrong: -1. What is no fault of the call (network, rate limits) is UNCLEAR."""
    UNCLEAR = "unclear"
    """The reader abstains."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What the reader made of a next state."""

    kind: ReplyKind
    hint: str = ""
    """What the user would have wanted, in the user's own words, cleaned."""
