"""The comparisons of two policies that can be voted on."""

import secrets
from collections import OrderedDict
from dataclasses import dataclass

SIDES = ("left", "right")
#: Comparisons that wait for a vote; older ones can no longer be voted on.
MAX_OPEN = 100


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two answers that wait for a vote."""

    owner: str
    versions: tuple[int, int]
    """As they were chosen, in the order of `SIDES`."""
    completions: tuple[str, str]


class Comparisons:
    """The comparisons that can be voted on."""

    def __init__(self) -> None:
        self._open: OrderedDict[str, Comparison] = OrderedDict()

    def add(self, comparison: Comparison) -> str:
        name = secrets.token_urlsafe(12)
        self._open[name] = comparison
        while len(self._open) > MAX_OPEN:
            self._open.popitem(last=False)
        return name

    def take(self, name: str, owner: str) -> Comparison | None:
        """A comparison of this owner, which can then not be voted on again."""
        comparison = self._open.get(name)
        return self._open.pop(name) if comparison is not None and comparison.owner == owner else None
