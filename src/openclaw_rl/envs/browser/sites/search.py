"""Search: open a result, search and open a result, search over several pages and borrow the right book."""

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from openclaw_rl.envs.base import Outcome
from openclaw_rl.envs.browser.sites.parts import (
    Page,
    PageForm,
    PageLink,
    Paragraph,
    SendButton,
    TableRow,
    TextField,
    Widget,
)
from openclaw_rl.envs.browser.sites.site import MOST_PARTIAL, SURNAMES, SiteDraft, SiteMove

#: Results on a page.
PAGE_RESULTS = 3
YEARS = range(1990, 2027)
TOPICS = (
    *("garden", "chess", "piano", "sailing", "bread", "pottery", "birds", "maps"),
    *("clocks", "bridges", "stars", "poems", "rivers", "trains", "coffee", "paper"),
)
FORMS_OF_BOOKS = ("handbook", "history", "guide", "atlas", "stories", "lessons")


class Searches:
    """The family of searches in a catalogue of books."""

    def draw(self, random: Random, level: int) -> SiteDraft:
        return draw_result(random) if level == 1 else draw_search(random, borrows=level == 3)

    def site(self, content: Mapping[str, Any]) -> "SearchSite":
        return SearchSite(content)


class SearchSite:
    """A catalogue. It is over when a book was opened or, where books can be borrowed, when one was borrowed."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.query: str | None = None if content["search"] else ""
        self.opened = self.chosen = -1

    @property
    def over(self) -> bool:
        return self.chosen >= 0

    def get(self, path: str) -> Page:
        if self.over:
            return Page([Paragraph("Here it is.")])
        if (book := number_in(path, "/book/")) is not None and book < len(self.content["books"]):
            return self._open(book)
        parts: list[Widget | TableRow | PageForm] = []
        if self.content["search"]:
            parts.append(PageForm("/search", (TextField("Search", "query"), SendButton("Find"))))
        if self.query is None:
            return Page(parts)
        results = [index for index, book in enumerate(self.content["books"]) if self.query in book[0]]
        first = (number_in(path, "/results/") or 0) * PAGE_RESULTS
        for index in results[first : first + PAGE_RESULTS]:
            title, author, year = self.content["books"][index]
            link = PageLink(title, f"/book/{index}")
            parts.append(TableRow((link, author, year)) if self.content["borrows"] else link)
        if first + PAGE_RESULTS < len(results):
            parts.append(PageLink("Next", f"/results/{first // PAGE_RESULTS + 1}"))
        return Page(parts if results else [*parts, Paragraph("Nothing was found.")])

    def post(self, path: str, fields: Mapping[str, str]) -> str:
        if path == "/borrow" and self.opened >= 0:
            self.chosen = self.opened
        elif path == "/search":
            self.query = fields.get("query", "").strip().lower()
            return "/results/0"
        return "/"

    def outcome(self) -> Outcome:
        wanted = self.content["wanted"]
        if self.chosen == wanted:
            return Outcome(1.0, solved=True)
        # Half of the way is to search for the right word.
        searched = bool(self.content["search"]) and self.query == self.content["query"]
        hint = f'Open the book "{self.content["books"][wanted][0]}".'
        return Outcome(MOST_PARTIAL / 2 if searched else 0.0, solved=False, hint=hint)

    def _open(self, book: int) -> Page:
        title, author, year = self.content["books"][book]
        self.opened = book
        if not self.content["borrows"]:
            self.chosen = book
        borrow: list[PageForm | PageLink] = [
            PageForm("/borrow", (SendButton("Borrow"),)),
            PageLink("Results", "/results/0"),
        ]
        return Page([Paragraph(f"{title}, {author}, {year}"), *(borrow if self.content["borrows"] else [])])


def draw_result(random: Random) -> SiteDraft:
    titles = [title(topic, random) for topic in random.sample(TOPICS, 3)]
    wanted = random.randrange(3)
    content = catalogue([[name, "", ""] for name in titles], wanted, search=False)
    return SiteDraft(f'Open "{titles[wanted]}".', content, [SiteMove("click", "link", titles[wanted])])


def draw_search(random: Random, *, borrows: bool) -> SiteDraft:
    topic, *others = random.sample(TOPICS, 3)
    books = [[f"{topic} {form}", *origin(random)] for form in random.sample(FORMS_OF_BOOKS, 5 if borrows else 2)]
    books += [[title(other, random), *origin(random)] for other in others]
    wanted = random.randrange(5 if borrows else 2)
    content = catalogue(books, wanted, search=True, query=topic, borrows=borrows)
    name, author, year = books[wanted]
    moves = [SiteMove("type", "textbox", "Search", topic), SiteMove("click", "button", "Find")]
    moves += [SiteMove("click", "link", "Next")] * (wanted // PAGE_RESULTS)
    moves.append(SiteMove("click", "link", name))
    if not borrows:
        return SiteDraft(f'Search for "{topic}" and open "{name}".', content, moves)
    goal = f'Search for "{topic}" and borrow the book by {author} from {year}.'
    return SiteDraft(goal, content, [*moves, SiteMove("click", "button", "Borrow")])


def catalogue(books: Sequence[Sequence[str]], wanted: int, **facts: Any) -> dict[str, Any]:
    return {"books": books, "wanted": wanted, "query": "", "borrows": False, **facts}


def title(topic: str, random: Random) -> str:
    return f"{topic} {random.choice(FORMS_OF_BOOKS)}"


def origin(random: Random) -> tuple[str, str]:
    return random.choice(SURNAMES), str(random.choice(YEARS))


def number_in(path: str, prefix: str) -> int | None:
    """The number after a prefix."""
    rest = path.removeprefix(prefix)
    return int(rest) if path.startswith(prefix) and rest.isascii() and rest.isdecimal() and len(rest) < 6 else None
