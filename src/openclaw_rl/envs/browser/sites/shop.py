"""A shop: put an article into the cart, order some of it, order two articles with a delivery."""

from collections.abc import Mapping
from random import Random
from typing import Any

from openclaw_rl.envs.base import Outcome
from openclaw_rl.envs.browser.sites.parts import (
    ChoiceField,
    Page,
    PageForm,
    PageLink,
    Paragraph,
    SendButton,
    TableRow,
    TextField,
    Widget,
)
from openclaw_rl.envs.browser.sites.site import SURNAMES, SiteDraft, SiteMove, share_right

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


class Shops:
    """The family of shops."""

    def draw(self, random: Random, level: int) -> SiteDraft:
        if level == 1:
            return draw_article(random)
        return draw_order(random, articles=1) if level == 2 else draw_order(random, articles=2)

    def site(self, content: Mapping[str, Any]) -> "ShopSite":
        return ShopSite(content)


class ShopSite:
    """Articles, a cart and an order. It is over when the order was sent; at the first level, with the first article."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content
        self.cart: dict[str, int] = {}
        self.order: dict[str, str] | None = None

    @property
    def over(self) -> bool:
        return self.order is not None

    def get(self, path: str) -> Page:
        if self.over:
            return Page([Paragraph("Thank you.")])
        prices = self.content["prices"]
        name = path.removeprefix("/article/")
        if not self.content["orders"]:
            rows = (TableRow((one, price, SendButton(f"Add {one}", "article", one))) for one, price in prices.items())
            return Page([PageForm("/add", tuple(rows))])
        if path == "/cart":
            return self._cart()
        if path.startswith("/article/") and name in prices:
            fields = (TextField("Number", "number", "1"), SendButton("Add to cart", "article", name))
            return Page([Paragraph(f"{name}, {prices[name]}"), PageForm("/add", fields), PageLink("Articles", "/")])
        rows = (TableRow((PageLink(one, f"/article/{one}"), price)) for one, price in prices.items())
        return Page([*rows, PageLink("Cart", "/cart")])

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
        delivery = self.content["delivery"]
        problems = [
            f"The cart must have {wanted.get(name, 0)} of {name}, not {self.cart.get(name, 0)}."
            for name in sorted(wanted.keys() | self.cart.keys())
            if wanted.get(name) != self.cart.get(name)
        ]
        # Nothing counts without an article that was asked for.
        if not wanted.keys() & self.cart.keys():
            return Outcome(0.0, solved=False, hint=problems[0])
        sent = self.order or {}
        if self.over:
            problems += [
                f'{name} must be "{value}", not "{sent.get(name, "")}".'
                for name, value in delivery.items()
                if sent.get(name) != value
            ]
        return share_right(problems, max(len(wanted) + len(delivery), 2), ended=self.over)

    def _cart(self) -> Page:
        rows = [TableRow((name, str(number))) for name, number in self.cart.items()]
        fields: list[Widget] = []
        if "Name" in self.content["delivery"]:
            fields = [TextField("Name", "Name"), ChoiceField("Delivery", "Delivery", DELIVERIES, DELIVERIES[0])]
        buttons = (SendButton("Order", value="Order"), SendButton("Empty cart", value="empty"))
        return Page([*rows, PageForm("/order", (*fields, *buttons)), PageLink("Articles", "/")])


def draw_article(random: Random) -> SiteDraft:
    prices = draw_prices(random, 3)
    wanted = random.choice(list(prices))
    content = {"prices": prices, "orders": False, "wanted": {wanted: 1}, "delivery": {}}
    return SiteDraft(f'Add "{wanted}".', content, [SiteMove("click", "button", f"Add {wanted}")])


def draw_order(random: Random, articles: int) -> SiteDraft:
    prices = draw_prices(random, 3 * articles)
    wanted = {name: random.randint(2, 9) for name in random.sample(list(prices), articles)}
    delivery: dict[str, str] = {}
    goal = f"Order {' and '.join(f'{number} of {name}' for name, number in wanted.items())}"
    moves: list[SiteMove] = []
    for index, (name, number) in enumerate(wanted.items()):
        moves += [SiteMove("click", "link", "Articles")] * bool(index)
        moves += [SiteMove("click", "link", name), SiteMove("type", "textbox", "Number", str(number))]
        moves.append(SiteMove("click", "button", "Add to cart"))
    if articles > 1:
        delivery = {
            "Name": f"{random.choice(PEOPLE)} {random.choice(SURNAMES)}",
            "Delivery": random.choice(DELIVERIES[1:]),
        }
        goal += f' for "{delivery["Name"]}", delivery by "{delivery["Delivery"]}"'
        moves.append(SiteMove("type", "textbox", "Name", delivery["Name"]))
        moves.append(SiteMove("select", "combobox", "Delivery", delivery["Delivery"]))
    content = {"prices": prices, "orders": True, "wanted": wanted, "delivery": delivery}
    return SiteDraft(f"{goal}.", content, [*moves, SiteMove("click", "button", "Order")])


def draw_prices(random: Random, number: int) -> dict[str, str]:
    return {name: f"{random.randint(1, 99)}.{random.randint(0, 9)}0 EUR" for name in random.sample(GOODS, number)}
