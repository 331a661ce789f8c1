"""What an answer may look like, if a client restricts it: JSON that fits a schema, or tool calls."""

from dataclasses import dataclass
from enum import StrEnum


class Thinking(StrEnum):
    """Whether reasoning may stand before the restricted part of an answer."""

    NONE = "none"
    OPTIONAL = "optional"
    """The answer may begin with a `<think>` block."""
    BEGUN = "begun"
    """The prompt has opened the block; the answer closes it."""


@dataclass(frozen=True, slots=True)
class JsonForm:
    """A JSON value that fits a schema, with fixed text around it."""

    schema: str
    """As JSON."""
    before: str = ""
    after: str = ""
    strict: bool = True
    """Whether a keyword that cannot be enforced is refused; otherwise it is ignored."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """Restricts an answer to one JSON value (`content`) or to tool calls (`calls`); if both are given, to either.

    With a `trigger`, text is free, and only calls within it are restricted.
    """

    content: JsonForm | None = None
    calls: tuple[JsonForm, ...] = ()
    """The calls that are possible."""
    separator: str | None = None
    """The text between two calls; None if there is only one call."""
    thinking: Thinking = Thinking.NONE
    trigger: str = ""
    """How every call begins. Text that is not a call does not contain it."""
