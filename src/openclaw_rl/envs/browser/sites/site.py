"""A built-in site: it answers requests with pages, remembers what was done, and scores it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Protocol

from openclaw_rl.envs.base import Outcome
from openclaw_rl.envs.browser.sites.parts import Page

#: A share of the parts that are right never counts as much as solving the task.
MOST_PARTIAL = 0.8
SURNAMES = (
    *("Adler", "Brandt", "Cole", "Diaz", "Evans", "Frost", "Gray", "Holt"),
    *("Ito", "Jensen", "Klein", "Lund", "Moss", "Nagy", "Otto", "Park"),
)


@dataclass(frozen=True, slots=True)
class SiteMove:
    """One step of a solution: an action on the element with a role and a name."""

    kind: str
    role: str
    name: str
    text: str = ""

    def as_list(self) -> list[str]:
        return [self.kind, self.role, self.name, self.text]


@dataclass(frozen=True, slots=True)
class SiteDraft:
    """A task of a site: what is asked, what the site contains, and how it is solved."""

    goal: str
    content: Mapping[str, Any]
    solution: Sequence[SiteMove]


class Site(Protocol):
    """One attempt's site."""

    @property
    def over(self) -> bool:
        """Whether the last action ended the attempt, for example by sending the order."""
        ...

    def get(self, path: str) -> Page:
        """The page at a path; the first page for a path that is not known."""
        ...

    def post(self, path: str, fields: Mapping[str, str]) -> str:
        """Take what a form sends; the path of the page that follows."""
        ...

    def outcome(self) -> Outcome: ...


class SiteFamily(Protocol):
    """A kind of site: it draws tasks, and makes the site of a task from its content."""

    def draw(self, random: Random, level: int) -> SiteDraft: ...
    def site(self, content: Mapping[str, Any]) -> Site: ...


def share_right(problems: Sequence[str], checks: int, *, ended: bool) -> Outcome:
    """The outcome where `checks` things had to be right, and these were not."""
    if not problems and ended:
        return Outcome(1.0, solved=True)
    if not ended:
        problems = [*problems, "The last step is missing."]
    reward = MOST_PARTIAL * max(checks - len(problems), 0) / checks if ended else 0.0
    return Outcome(reward, solved=False, hint=" ".join(problems[:3]))
