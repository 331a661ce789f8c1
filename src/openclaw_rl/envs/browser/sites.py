"""The built-in sites: a catalogue to search, and a shop.

The catalogue: open a result; search and open a result; search over several pages and borrow the right book.
The shop: put an article into the cart; order some of it; order two articles with a delivery.
"""

from collections.abc import Mapping
from random import Random
from typing import Any

from openclaw_rl.envs.base import Outcome
from openclaw_rl.envs.browser.site_pages import (
    Move,
    Row,
    Site,
    SiteDraft,
    SitePage,
    Widget,
    button,
    click,
    link,
    textbox,
)

#: A share of what is right never counts as much as solving the task.
MOST_PARTIAL = 0.8
SURNAMES = (
    *("Adler", "Brandt", "Cole", "Diaz", "Evans", "Frost", "Gray", "Holt"),
    *("Ito", "Jensen", "Klein", "Lund", "Moss", "Nagy", "Otto", "Park"),
)
#: Results on a page.
PAGE_RESULTS = 3
YEARS = range(1990, 2027)
TOPICS = (
    *("garden", "chess", "piano", "sailing", "bread", "pottery", "birds", "maps"),
    *("clocks", "bridges", "stars", "poems", "rivers", "trains", "coffee", "paper"),
)
FORMS_OF_BOOKS = ("handbook", "history", "guide", "atlas", "stories", "lessons")
PEOPLE = (
    *("Ada", "Ben", "Cleo", "Dina", "Egon", "Fay", "Gus", "Hana", "Ivo", "Jana", "Kai"),
    *("Lena", "Mara", "Nils", "Olga", "Paul", "Rosa", "Sven", "Tara", "Uwe", "Vera"),
)
GOODS = (
    *("tea", "lamp", "chair", "soap", "rope", "bread", "candle", "basket", "kettle", "blanket", "mirror"),
    *("pencil", "shovel", "ladder", "bucket", "pillow", "broom", "jacket", "carpet", "hammer", "needle"),
    *("plate", "spoon", "towel", "vase", "wallet", "bottle", "brush", "comb", "drum", "flute", "glove"),
)
DELIVERIES = ("Post", "Courier", "Pick-up")
#: A larger number of one article is not taken.
MAX_NUMBER = 99


class SearchSite(Site):
    """A catalogue. It is over when a book was opened or, where books can be borrowed, when one was borrowed."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.query: str | None = None if content["search"] else ""
        self.opened = -1
        self.chosen = -1

    @staticmethod
    def draw(random: Random, level: int) -> SiteDraft:
        return draw_result(random) if level == 1 else draw_search(random, borrows=level == 3)

    @property
    def over(self) -> bool:
        return self.chosen >= 0

    def get(self, path: str) -> SitePage:
        if self.over:
            return SitePage(["Here it is."])
        book = number_in(path, "/book/")
        if book is not None and book < len(self.content["books"]):
            return self._open(book)
        rows: list[Row] = [textbox("Search", "query"), button("Find")] if self.content["search"] else []
        if self.query is not None:
            rows += self._results(number_in(path, "/results/") or 0)
        return SitePage(rows, "/search")

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

    def _results(self, page: int) -> list[Row]:
        found = [(index, *book) for index, book in enumerate(self.content["books"]) if (self.query or "") in book[0]]
        if not found:
            return ["Nothing was found."]
        rows: list[Row] = []
        for index, title, author, year in found[page * PAGE_RESULTS : (page + 1) * PAGE_RESULTS]:
            book = link(title, f"/book/{index}")
            rows.append((book, author, year) if self.content["borrows"] else book)
        if (page + 1) * PAGE_RESULTS < len(found):
            rows.append(link("Next", f"/results/{page + 1}"))
        return rows

    def _open(self, book: int) -> SitePage:
        self.opened = book
        about = ", ".join(self.content["books"][book])
        if self.content["borrows"]:
            return SitePage([about, button("Borrow"), link("Results", "/results/0")], "/borrow")
        self.chosen = book
        return SitePage([about])


def number_in(path: str, prefix: str) -> int | None:
    """The number after a prefix."""
    rest = path.removeprefix(prefix)
    return int(rest) if path.startswith(prefix) and rest.isascii() and rest.isdecimal() and len(rest) < 6 else None


def draw_result(random: Random) -> SiteDraft:
    titles = [title(topic, random) for topic in random.sample(TOPICS, 3)]
    wanted = random.randrange(3)
    books = [[name, "", ""] for name in titles]
    content = {"books": books, "wanted": wanted, "query": "", "borrows": False, "search": False}
    return SiteDraft(f'Open "{titles[wanted]}".', content, [click("link", titles[wanted])])


def draw_search(random: Random, *, borrows: bool) -> SiteDraft:
    topic, *others = random.sample(TOPICS, 3)
    books = [[f"{topic} {form}", *origin(random)] for form in random.sample(FORMS_OF_BOOKS, 5 if borrows else 2)]
    books += [[title(other, random), *origin(random)] for other in others]
    wanted = random.randrange(5 if borrows else 2)
    content = {"books": books, "wanted": wanted, "query": topic, "borrows": borrows, "search": True}
    name, author, year = books[wanted]
    moves = [["type", "textbox", "Search", topic], click("button", "Find")]
    moves += [click("link", "Next")] * (wanted // PAGE_RESULTS)
    moves.append(click("link", name))
    if not borrows:
        return SiteDraft(f'Search for "{topic}" and open "{name}".', content, moves)
    goal = f'Search for "{topic}" and borrow the book by {author} from {year}.'
    return SiteDraft(goal, content, [*moves, click("button", "Borrow")])


def title(topic: str, random: Random) -> str:
    return f"{topic} {random.choice(FORMS_OF_BOOKS)}"


def origin(random: Random) -> tuple[str, str]:
    return random.choice(SURNAMES), str(random.choice(YEARS))


class ShopSite(Site):
    """Articles, a cart and an order. It is over when the order was sent; at the first level, with the first article."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.cart: dict[str, int] = {}
        self.order: dict[str, str] | None = None

    @staticmethod
    def draw(random: Random, level: int) -> SiteDraft:
        return draw_article(random) if level == 1 else draw_order(random, articles=level - 1)

    @property
    def over(self) -> bool:
        return self.order is not None

    def get(self, path: str) -> SitePage:
        if self.over:
            return SitePage(["Thank you."])
        prices: Mapping[str, str] = self.content["prices"]
        name = path.removeprefix("/article/")
        if not self.content["orders"]:
            return SitePage(
                [(one, price, button(f"Add {one}", "article", one)) for one, price in prices.items()], "/add"
            )
        if path == "/cart":
            return self._cart()
        if path.startswith("/article/") and name in prices:
            fields = [textbox("Number", "number", "1"), button("Add to cart", "article", name)]
            return SitePage([f"{name}, {prices[name]}", *fields, link("Articles", "/")], "/add")
        articles = [(link(one, f"/article/{one}"), price) for one, price in prices.items()]
        return SitePage([*articles, link("Cart", "/cart")])

    def post(self, path: str, fields: Mapping[str, str]) -> str:
        article = fields.get("article", "")
        number = fields.get("number", "1").strip()
        if path == "/add" and not self.over and article in self.content["prices"]:
            valid = number.isascii() and number.isdecimal() and len(number) < 4 and 0 < int(number) <= MAX_NUMBER
            if valid:
                self.cart[article] = min(self.cart.get(article, 0) + int(number), MAX_NUMBER)
            if not self.content["orders"]:
                self.order = {}
            return "/cart" if valid else f"/article/{article}"
        if path == "/order" and not self.over and fields.get("button") == "Order" and self.cart:
            self.order = {name: fields.get(name, "").strip() for name in self.content["delivery"]}
        elif path == "/order" and not self.over:
            self.cart.clear()
        return "/cart"

    def outcome(self) -> Outcome:
        wanted = self.content["wanted"]
        problems = [
            f"The cart must have {wanted.get(name, 0)} of {name}, not {self.cart.get(name, 0)}."
            for name in sorted(wanted.keys() | self.cart.keys())
            if wanted.get(name) != self.cart.get(name)
        ]
        # Nothing counts without an article that was asked for.
        if not wanted.keys() & self.cart.keys():
            return Outcome(0.0, solved=False, hint=problems[0])
        if self.order is None:
            return Outcome(0.0, solved=False, hint=" ".join([*problems, "The last step is missing."][:3]))
        sent = self.order
        delivery = self.content["delivery"]
        problems += [
            f'{name} must be "{value}", not "{sent.get(name, "")}".'
            for name, value in delivery.items()
            if sent.get(name) != value
        ]
        if not problems:
            return Outcome(1.0, solved=True)
        checks = max(len(wanted) + len(delivery), 2)
        reward = MOST_PARTIAL * max(checks - len(problems), 0) / checks
        return Outcome(reward, solved=False, hint=" ".join(problems[:3]))

    def _cart(self) -> SitePage:
        rows: list[Row] = [(name, str(number)) for name, number in self.cart.items()]
        if "Name" in self.content["delivery"]:
            rows += [textbox("Name", "Name"), Widget("combobox", "Delivery", "Delivery", DELIVERIES[0], DELIVERIES)]
        rows += [button("Order", value="Order"), button("Empty cart", value="empty"), link("Articles", "/")]
        return SitePage(rows, "/order")


def draw_article(random: Random) -> SiteDraft:
    prices = draw_prices(random, 3)
    wanted = random.choice(list(prices))
    content = {"prices": prices, "orders": False, "wanted": {wanted: 1}, "delivery": {}}
    return SiteDraft(f'Add "{wanted}".', content, [click("button", f"Add {wanted}")])


def draw_order(random: Random, articles: int) -> SiteDraft:
    prices = draw_prices(random, 3 * articles)
    wanted = {name: random.randint(2, 9) for name in random.sample(list(prices), articles)}
    delivery: dict[str, str] = {}
    goal = f"Order {' and '.join(f'{number} of {name}' for name, number in wanted.items())}"
    moves: list[Move] = []
    for index, (name, number) in enumerate(wanted.items()):
        moves += [click("link", "Articles")] * bool(index)
        moves += [click("link", name), ["type", "textbox", "Number", str(number)], click("button", "Add to cart")]
    if articles > 1:
        delivery["Name"] = f"{random.choice(PEOPLE)} {random.choice(SURNAMES)}"
        delivery["Delivery"] = random.choice(DELIVERIES[1:])
        goal += f' for "{delivery["Name"]}", delivery by "{delivery["Delivery"]}"'
        moves.append(["type", "textbox", "Name", delivery["Name"]])
        moves.append(["select", "combobox", "Delivery", delivery["Delivery"]])
    content = {"prices": prices, "orders": True, "wanted": wanted, "delivery": delivery}
    return SiteDraft(f"{goal}.", content, [*moves, click("button", "Order")])


def draw_prices(random: Random, number: int) -> dict[str, str]:
    return {name: f"{random.randint(1, 99)}.{random.randint(0, 9)}0 EUR" for name in random.sample(GOODS, number)}
