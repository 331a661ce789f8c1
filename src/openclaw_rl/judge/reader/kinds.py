"""The kinds of replies, and the result of reading one."""

from dataclasses import dataclass
from enum import StrEnum


class ReplyKind(StrEnum):
    """The kinds of next states."""

    ACKNOWLEDGEMENT = "acknowledgement"
    """The user says that the response is good: +1."""
    CORRECTION = "correction"
    """The user says what was wrong or what is right: -1, and these words are the hint."""
    REJECTION = "rejection"
    """The user says that the response is wrong or useless, but not what is right: -1, no hint."""
    REPETITION = "repetition"
    """The user asks the same again, in the same or other words: -1, no hint."""
    CHANGE_REQUEST = "change_request"
    """The user wants a change (shorter, another form, an addition): -1, and these words are the hint."""
    MOVING_ON = "moving_on"
    """The user announces the next step: +1."""
    TOOL_SUCCESS = "tool_success"
    TOOL_ERROR = "tool_error"
    """The call could not do its work: -1. Failures from outside (network, rate limits, the user) are UNCLEAR."""
    UNCLEAR = "unclear"
    """The reader abstains."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of reading a next state."""

    kind: ReplyKind
    hint: str = ""
    """What the user wanted, in the user's own words, cleaned."""
