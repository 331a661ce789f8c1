"""What a check has found."""

from dataclasses import dataclass
from enum import StrEnum


class Health(StrEnum):
    """How a part is doing."""

    OK = "ok"
    NOTE = "note"
    """Worth knowing; a server works nevertheless."""
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """What a check has found, and how to mend it if it is not well."""

    health: Health
    text: str
    mend: str = ""


def ok(text: str) -> Finding:
    return Finding(Health.OK, text)


def note(text: str, mend: str = "") -> Finding:
    return Finding(Health.NOTE, text, mend)


def broken(text: str, mend: str) -> Finding:
    return Finding(Health.BROKEN, text, mend)
