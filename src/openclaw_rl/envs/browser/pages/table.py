"""Tables: open a row, find a row by its values, delete rows over several pages."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from openclaw_rl.envs.base import Outcome
from openclaw_rl.envs.browser.pages.parts import Page, PageForm, PageLink, Paragraph, SendButton, TableRow
from openclaw_rl.envs.browser.pages.site import MOST_PARTIAL, SiteDraft, SiteMove, share_right
from openclaw_rl.envs.browser.pages.words import CITIES, PEOPLE, SURNAMES

#: Rows on a page of the third level.
PAGE_ROWS = 5


class Tables:
    """The family of tables of people."""

    def draw(self, random: Random, level: int) -> SiteDraft:
        if level == 1:
            return draw_named(random)
        return draw_described(random) if level == 2 else draw_deletions(random)

    def site(self, content: Mapping[str, Any]) -> "OpenRowSite | DeleteRowsSite":
        return DeleteRowsSite(content) if "gone" in content else OpenRowSite(content)


class OpenRowSite:
    """A table in which one row is to be opened and, if its page has buttons, one to be clicked. Then it is over."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.opened = self.clicked = ""

    @property
    def over(self) -> bool:
        return bool(self.clicked if self.content["buttons"] else self.opened)

    def get(self, path: str) -> Page:
        name = path.rpartition("/")[2]
        if path.startswith("/open/") and name in {row[0] for row in self.content["rows"]}:
            self.opened = name if not self.over else self.opened
            buttons = tuple(SendButton(button, value=button) for button in self.content["buttons"])
            forms = [PageForm(f"/click/{name}", buttons)] if buttons else []
            return Page([Paragraph(f"This is {name}."), *forms])
        head = [TableRow(tuple(self.content["head"]))] if self.content["head"] else []
        rows = [TableRow((*row, PageLink(f"Open {row[0]}", f"/open/{row[0]}"))) for row in self.content["rows"]]
        return Page([*head, *rows])

    def post(self, path: str, fields: Mapping[str, str]) -> str:
        if not self.over and path == f"/click/{self.opened}":
            self.clicked = fields.get("button", "")
        return "/"

    def outcome(self) -> Outcome:
        wanted, button = self.content["wanted"], self.content["button"]
        if self.opened != wanted:
            return Outcome(0.0, solved=False, hint=f'Click the link "Open {wanted}".')
        if self.clicked != button:
            return Outcome(MOST_PARTIAL / 2, solved=False, hint=f'Click the button "{button}".')
        return Outcome(1.0, solved=True)


class DeleteRowsSite:
    """A table of several pages from which some rows are to be deleted. It is over when Finish was clicked."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.rows: list[Sequence[str]] = list(content["rows"])
        self.over = False

    def get(self, path: str) -> Page:
        if self.over:
            return Page([Paragraph("Finished.")])
        number = int(path[6:]) if path.startswith("/page/") and path[6:].isdecimal() and len(path) < 12 else 0
        pages = max(-(-len(self.rows) // PAGE_ROWS), 1)
        number = min(number, pages - 1)
        shown = self.rows[number * PAGE_ROWS :][:PAGE_ROWS]
        rows = tuple(TableRow((*row, SendButton(f"Delete {row[0]}", "delete", row[0]))) for row in shown)
        links: list[PageLink | PageForm] = [PageForm(f"/page/{number}", rows)]
        links += [PageLink("Previous", f"/page/{number - 1}")] if number else []
        links += [PageLink("Next", f"/page/{number + 1}")] if number + 1 < pages else []
        links.append(PageForm("/finish", (SendButton("Finish"),)))
        return Page([Paragraph(f"Page {number + 1} of {pages}"), *links])

    def post(self, path: str, fields: Mapping[str, str]) -> str:
        if not self.over and path == "/finish":
            self.over = True
        elif not self.over:
            self.rows = [row for row in self.rows if row[0] != fields.get("delete")]
        return path

    def outcome(self) -> Outcome:
        left, gone = {row[0] for row in self.rows}, set(self.content["gone"])
        everybody = {row[0] for row in self.content["rows"]}
        problems = [f"Delete {name}." for name in sorted(gone & left)]
        problems += [f"Do not delete {name}." for name in sorted(everybody - left - gone)]
        if len(left) == len(everybody):
            return Outcome(0.0, solved=False, hint=problems[0])
        return share_right(problems, len(everybody), ended=self.over)


def draw_named(random: Random) -> SiteDraft:
    names = people(random, 3)
    wanted = random.choice(names)
    content = {"head": [], "rows": [[name] for name in names], "wanted": wanted, "buttons": [], "button": ""}
    return SiteDraft(f'Open "{wanted}".', content, [SiteMove("click", "link", f"Open {wanted}")])


def draw_described(random: Random) -> SiteDraft:
    names, cities, ages = people(random, 5), random.sample(CITIES, 5), random.sample(range(20, 80), 5)
    rows = [[name, city, str(age)] for name, city, age in zip(names, cities, ages, strict=True)]
    wanted, city, age = random.choice(rows)
    goal = f'Open the person {random.choice((f"from {city}", f"of age {age}"))} and click "Invite".'
    content = {"head": ["Name", "City", "Age"], "rows": rows, "wanted": wanted}
    moves = [SiteMove("click", "link", f"Open {wanted}"), SiteMove("click", "button", "Invite")]
    return SiteDraft(goal, {**content, "buttons": ["Delete", "Invite"], "button": "Invite"}, moves)


def draw_deletions(random: Random) -> SiteDraft:
    names = people(random, 12)
    city, *others = random.sample(CITIES, 4)
    gone = set(random.sample(names, 3))
    rows = [[name, city if name in gone else random.choice(others)] for name in names]
    goal = f"Delete everybody from {city} on all pages, nobody else, then click Finish."
    content = {"rows": rows, "gone": sorted(gone)}
    return SiteDraft(goal, content, deletion_moves(rows, gone))


def deletion_moves(rows: Sequence[Sequence[str]], gone: set[str]) -> list[SiteMove]:
    """Delete what is to go on each page, then turn to the next."""
    left, number, moves = [row[0] for row in rows], 0, []
    while True:
        shown = left[number * PAGE_ROWS :][:PAGE_ROWS]
        if target := next((name for name in shown if name in gone), None):
            moves.append(SiteMove("click", "button", f"Delete {target}"))
            left.remove(target)
        elif (number + 1) * PAGE_ROWS < len(left) and gone & set(left):
            moves.append(SiteMove("click", "link", "Next"))
            number += 1
        else:
            return [*moves, SiteMove("click", "button", "Finish")]


def people(random: Random, number: int) -> list[str]:
    return [f"{name} {random.choice(SURNAMES)}" for name in random.sample(PEOPLE, number)]
