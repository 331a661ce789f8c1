"""Reads a page without a browser: its texts, and whether it is well-formed, accessible and self-contained."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input"}
#: Elements that begin on a new line.
BLOCKS = {"div", "p", "li", "tr", "td", "th", "h1", "h2", "h3", "dt", "dd", "article", "section", "summary"}
#: Attributes that a browser follows.
FOLLOWED = {"src", "href", "srcset", "action", "data", "poster", "xlink:href", "formaction"}


@dataclass
class Element:
    """An element of a page."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    """All text inside it."""


@dataclass
class Seen:
    """A page."""

    elements: list[Element] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            element
            for element in self.elements
            if element.tag == tag and all(element.attributes.get(name) == value for name, value in wanted.items())
        ]

    @property
    def text(self) -> str:
        return self.all("body")[0].text

    def rows(self) -> list[list[str]]:
        """The cells of all tables, by row, with white space removed."""
        cells, rows = [e for e in self.elements if e.tag in ("tr", "td", "th")], list[list[str]]()
        for element in cells:
            if element.tag == "tr":
                rows.append([])
            else:
                rows[-1].append(" ".join(element.text.split()))
        return rows


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.seen, self.open = Seen(), list[Element]()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        assert len(element.attributes) == len(attrs), f"<{tag}> has an attribute twice"
        self.seen.elements.append(element)
        if tag in BLOCKS:
            self.handle_data("\n")
        if tag not in VOID:
            self.open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.elements.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data


def look(page: str) -> Seen:
    """Read a page in a file, and check the rules for every such page."""
    seen = read_page(page)
    check_alone(page, seen)
    return seen


def read_page(page: str) -> Seen:
    """Read a page, and check the rules for every page."""
    reader = _Reader()
    reader.feed(page)
    reader.close()
    assert not reader.open, f"<{reader.open[-1].tag}> is never closed"
    check_accessible(reader.seen)
    check_safe(reader.seen)
    return reader.seen


def check_safe(seen: Seen) -> None:
    """Check that nothing in the page runs but scripts from files, and that no style is inline."""
    for element in seen.elements:
        assert element.tag not in ("iframe", "object", "embed", "base"), element
        assert element.tag != "script" or element.attributes.get("src"), "a script inside the page"
        for name in element.attributes:
            assert not name.startswith("on"), f"{name} would run something"


def check_alone(page: str, seen: Seen) -> None:
    """Check that the page runs no code and fetches nothing."""
    ids = [element.attributes["id"] for element in seen.elements if "id" in element.attributes]
    assert len(set(ids)) == len(ids), "an id is used twice"
    for element in seen.elements:
        assert element.tag not in ("script", "iframe", "object", "embed", "base", "form"), element
        for name, value in element.attributes.items():
            assert not name.startswith("on"), f"{name} would run something"
            if name in FOLLOWED:
                assert value.startswith(("data:", "#")), f"{name}={value} leaves the page"
                assert not value.startswith("#") or value[1:] in ids, f"{value} does not exist"
            if name in ("aria-labelledby", "aria-describedby"):
                assert value in ids, f"{value} does not exist"
            for place in re.findall(r"url\(([^)]*)\)", value) if element.tag != "meta" and name != "title" else ():
                assert place[1:] in ids, f"{place} does not exist"
    style = "".join(element.text for element in seen.all("style"))
    assert len(seen.all("style")) == 1
    assert "url(" not in style
    assert "@import" not in style
    assert page.startswith("<!doctype html>")


def check_accessible(seen: Seen) -> None:
    assert seen.all("html")[0].attributes["lang"] == "en"
    assert len(seen.all("h1")) == 1
    assert seen.all("title")[0].text.strip()
    for picture in seen.all("svg"):
        if picture.attributes.get("aria-hidden") != "true":
            assert picture.attributes["role"] == "img"
            assert picture.attributes["aria-label"]
    for head in seen.all("th"):
        assert head.attributes["scope"] in ("row", "col")
