"""Pages of built-in sites, which are known without a browser: as HTML, and as the model sees them.

So examples are made without Chromium, and tests compare such a page with what Chromium shows.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from random import Random
from typing import Any

from openclaw_rl.envs.base import Outcome
from openclaw_rl.envs.browser.actions import BrowserAction
from openclaw_rl.envs.browser.errors import PageFailed
from openclaw_rl.envs.browser.view import PageElement, PageText, PageView, Part

STYLE = (
    "body{font:16px sans-serif;margin:16px}label,input,select,button{margin:4px}td,th{padding:4px 12px;text-align:left}"
)
HEAD = f'<title>Page</title><meta charset="utf-8"><link rel="icon" href="data:,"><style>{STYLE}</style>'
FIELDS = ("textbox", "combobox")


@dataclass(frozen=True, slots=True)
class Widget:
    """What can be used on a page."""

    role: str
    """link, button, textbox or combobox."""
    text: str
    """What it says; the label of a field."""
    name: str
    """The path that a link leads to; the name under which a form sends the others."""
    value: str = ""
    options: tuple[str, ...] = ()

    def html(self) -> str:
        text, name, value = escape(self.text), escape(self.name), escape(self.value)
        if self.role == "link":
            return f'<a href="{name}">{text}</a>'
        if self.role == "button":
            return f'<button name="{name}" value="{value}">{text}</button>'
        if self.role == "textbox":
            return f'<label>{text} <input name="{name}" value="{value}" autocomplete="off"></label>'
        options = "".join(f"<option{' selected' * (one == self.value)}>{escape(one)}</option>" for one in self.options)
        return f'<label>{text} <select name="{name}">{options}</select></label>'


#: A text, or something that can be used. Cells beside each other are a row of a table.
Cell = str | Widget
Row = Cell | tuple[Cell, ...]


def link(text: str, path: str) -> Widget:
    return Widget("link", text, path)


def button(text: str, name: str = "button", value: str = "send") -> Widget:
    """Sends the form of its page, and its own name and value with it."""
    return Widget("button", text, name, value)


def textbox(label: str, name: str, value: str = "") -> Widget:
    return Widget("textbox", label, name, value)


@dataclass(frozen=True, slots=True)
class SitePage:
    """Rows below each other. All fields and buttons of a page belong to one form."""

    rows: Sequence[Row]
    form: str = "/"
    """The path that the form is sent to."""

    def html(self) -> str:
        body = "".join(self._rows_as_html())
        form = f'<form method="post" action="{escape(self.form)}">{body}</form>'
        return f'<!doctype html><html lang="en"><head>{HEAD}</head><body>{form}</body></html>'

    def widgets(self) -> list[Widget]:
        """What can be used, in the order of the page."""
        return [cell for row in self.rows for cell in _cells(row) if isinstance(cell, Widget)]

    def view(self, filled: Mapping[str, str]) -> PageView:
        """The page as the model sees it, with the values that were filled in since it was loaded."""
        numbers = iter(range(len(self.widgets())))
        return PageView([[_shown(cell, filled, numbers) for cell in _cells(row)] for row in self.rows])

    def _rows_as_html(self) -> Iterator[str]:
        """Rows of cells that follow each other are one table."""
        in_table = False
        for row in self.rows:
            if isinstance(row, tuple) != in_table:
                in_table = not in_table
                yield "<table>" if in_table else "</table>"
            cells = [cell.html() if isinstance(cell, Widget) else escape(cell) for cell in _cells(row)]
            yield f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" if in_table else f"<div>{cells[0]}</div>"
        if in_table:
            yield "</table>"


def _cells(row: Row) -> tuple[Cell, ...]:
    return row if isinstance(row, tuple) else (row,)


def _shown(cell: Cell, filled: Mapping[str, str], numbers: Iterator[int]) -> Part:
    if isinstance(cell, str):
        return PageText(cell)
    value = filled.get(cell.name, cell.value) if cell.role in FIELDS else None
    return PageElement(cell.role, cell.text, value, options=cell.options, node=next(numbers))


#: One step of a solution: the kind of action, the role and the name of the element, and the text.
Move = list[str]


def click(role: str, name: str) -> Move:
    return ["click", role, name, ""]


@dataclass(frozen=True, slots=True)
class SiteDraft:
    """A task of a site: what is asked, what the site contains, and how it is solved."""

    goal: str
    content: Mapping[str, Any]
    solution: Sequence[Move]


class Site(ABC):
    """One attempt's site: it answers requests with pages, remembers what was done, and scores it."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.content = content

    @staticmethod
    @abstractmethod
    def draw(random: Random, level: int) -> SiteDraft:
        """A task of a level."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether the last action ended the attempt, for example by sending the order."""

    @abstractmethod
    def get(self, path: str) -> SitePage:
        """The page at a path; the first page for a path that is not known."""

    @abstractmethod
    def post(self, path: str, fields: Mapping[str, str]) -> str:
        """Take what a form sends; the path of the page that follows."""

    @abstractmethod
    def outcome(self) -> Outcome: ...


class ModelPage:
    """Shows a site's pages as they were made, without a browser. Examples are made with it."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._history: list[str] = []
        self._show("/")

    def view(self) -> PageView:
        return self._page.view(self._filled)

    def act(self, action: BrowserAction, element: PageElement | None) -> None:
        """Raises PageFailed."""
        if action.kind == "back":
            if len(self._history) < 2:
                raise PageFailed("There is no page to go back to.")
            del self._history[-1]
            self._show(self._history.pop())
        if element is None:
            return
        widget = self._page.widgets()[element.node]
        if action.kind == "click" and widget.role == "link":
            self._show(widget.name)
        elif action.kind == "click" and widget.role == "button":
            self._show(self._site.post(self._page.form, {**self._values(), widget.name: widget.value}))
        elif action.kind == "type":
            if widget.role != "textbox":
                raise PageFailed("Nothing can be typed into this element.")
            self._filled[widget.name] = action.text
        elif action.kind == "select":
            if widget.role != "combobox":
                raise PageFailed("This element has no options to select.")
            if action.text not in widget.options:
                raise PageFailed("There is no such option.")
            self._filled[widget.name] = action.text

    def _show(self, path: str) -> None:
        self._history.append(path)
        self._page = self._site.get(path)
        self._filled: dict[str, str] = {}

    def _values(self) -> dict[str, str]:
        """What the form sends, without its buttons."""
        fields = {widget.name: widget.value for widget in self._page.widgets() if widget.role in FIELDS}
        return fields | self._filled


def solve(site: Site, solution: Sequence[Move]) -> list[tuple[str, BrowserAction]]:
    """Do the moves of a solution; what the page showed before each, and the action."""
    page = ModelPage(site)
    turns = []
    for kind, role, name, text in solution:
        view = page.view()
        number = view.number(role, name)
        assert number is not None, f"the page has no {role} {name}"
        action = BrowserAction(kind, number, text)
        turns.append((view.text(), action))
        page.act(action, view.element(number))
    return turns
