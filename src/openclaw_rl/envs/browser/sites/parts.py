"""The parts that the pages of built-in sites are made of. Each can be written as HTML, and as the model sees it.

So a page is known without a browser: examples are made from it, and tests compare it with what Chromium shows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from openclaw_rl.envs.browser.view import Line, PageElement, PageText

STYLE = (
    "body{font:16px sans-serif;margin:16px}label,input,select,button{margin:4px}td,th{padding:4px 12px;text-align:left}"
)


@dataclass(frozen=True, slots=True)
class Paragraph:
    text: str


@dataclass(frozen=True, slots=True)
class PageLink:
    text: str
    path: str


@dataclass(frozen=True, slots=True)
class SendButton:
    """Sends the form that it stands in; `name` and `value` are sent with it."""

    text: str
    name: str = "button"
    value: str = "send"


@dataclass(frozen=True, slots=True)
class TextField:
    label: str
    name: str
    value: str = ""


@dataclass(frozen=True, slots=True)
class ChoiceField:
    """A list of which one option is chosen."""

    label: str
    name: str
    options: tuple[str, ...]
    value: str


Widget = Paragraph | PageLink | SendButton | TextField | ChoiceField


@dataclass(frozen=True, slots=True)
class TableRow:
    """Cells beside each other: texts, links and buttons."""

    cells: tuple[str | PageLink | SendButton, ...]


@dataclass(frozen=True, slots=True)
class PageForm:
    """Fields that are sent together. A table in it has rows whose buttons send it."""

    path: str
    widgets: tuple[Widget | TableRow, ...]


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a site."""

    parts: Sequence[Widget | TableRow | PageForm] = field(default_factory=tuple)

    def html(self) -> str:
        body = "".join(_blocks(self.parts))
        return f'<!doctype html><html lang="en"><head><title>Page</title><meta charset="utf-8"><link rel="icon" href="data:,"><style>{STYLE}</style></head><body>{body}</body></html>'  # noqa: E501

    def widgets(self) -> Iterator[tuple[Widget | TableRow, PageForm | None]]:
        """What stands on the page, and the form around it."""
        for part in self.parts:
            if isinstance(part, PageForm):
                yield from ((widget, part) for widget in part.widgets)
            else:
                yield part, None

    def targets(self) -> list[tuple[Widget, PageForm | None]]:
        """What can be used, in the order of the page."""
        flat: list[tuple[Widget | str, PageForm | None]] = []
        for widget, form in self.widgets():
            cells = widget.cells if isinstance(widget, TableRow) else (widget,)
            flat += [(cell, form) for cell in cells]
        return [(one, form) for one, form in flat if not isinstance(one, str | Paragraph)]

    def lines(self, filled: Mapping[str, str] | None = None) -> list[Line]:
        """The page as the model sees it, with the values that were filled in since it was loaded."""
        counter = iter(range(len(self.targets())))
        values = filled or {}
        lines: list[Line] = []
        for widget, _ in self.widgets():
            cells = widget.cells if isinstance(widget, TableRow) else (widget,)
            lines.append(
                [
                    shown
                    if isinstance(shown := _show(cell, values), PageText)
                    else PageElement(shown.role, shown.name, shown.value, shown.states, shown.options, next(counter))
                    for cell in cells
                ]
            )
        return lines


def _show(widget: Widget | str, values: Mapping[str, str]) -> PageElement | PageText:
    match widget:
        case str(text) | Paragraph(text):
            return PageText(text)
        case PageLink(text):
            return PageElement("link", text)
        case SendButton(text):
            return PageElement("button", text)
        case TextField(label, name, value):
            return PageElement("textbox", label, values.get(name, value))
        case ChoiceField(label, name, options, value):
            return PageElement("combobox", label, values.get(name, value), options=options)


def _blocks(parts: Sequence[Widget | TableRow | PageForm]) -> Iterator[str]:
    """HTML of parts; rows that follow each other are one table."""
    in_table = False
    for part in parts:
        if isinstance(part, TableRow) != in_table:
            in_table = not in_table
            yield "<table>" if in_table else "</table>"
        match part:
            case PageForm(path, widgets):
                yield f'<form method="post" action="{escape(path)}">{"".join(_blocks(widgets))}</form>'
            case TableRow(cells):
                yield f"<tr>{''.join(f'<td>{_html(cell)}</td>' for cell in cells)}</tr>"
            case _:
                yield f"<div>{_html(part)}</div>"
    if in_table:
        yield "</table>"


def _html(widget: Widget | str) -> str:
    match widget:
        case str(text):
            return escape(text)
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case PageLink(text, path):
            return f'<a href="{escape(path)}">{escape(text)}</a>'
        case SendButton(text, name, value):
            return f'<button name="{escape(name)}" value="{escape(value)}">{escape(text)}</button>'
        case TextField(label, name, value):
            field = f'<input name="{escape(name)}" value="{escape(value)}" autocomplete="off">'
            return f"<label>{escape(label)} {field}</label>"
        case ChoiceField(label, name, options, value):
            listed = "".join(f"<option{' selected' * (one == value)}>{escape(one)}</option>" for one in options)
            return f'<label>{escape(label)} <select name="{escape(name)}">{listed}</select></label>'
