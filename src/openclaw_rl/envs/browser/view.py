"""What the model sees of a page: lines of text, in which the elements that can be used have numbers."""

import json
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: Longer texts and names are cut.
MAX_NAME_CHARACTERS = 160
#: The options of a list that are shown; the rest is counted.
MAX_OPTIONS = 20
#: The lines of a page that are shown at once; scrolling shows others.
MAX_LINES = 60
#: The lines that stay visible when a page is scrolled.
OVERLAP = 5
#: A row that is longer is shown as several lines.
MAX_ROW_CHARACTERS = 400
EMPTY = "(an empty page)"


def quoted(text: str) -> str:
    """A page's text in quotes, on one line. So no page can write a line that looks like one of ours."""
    printable = (" " if unicodedata.category(sign)[0] in "CZ" else sign for sign in text[: 4 * MAX_NAME_CHARACTERS])
    words = " ".join("".join(printable).split())
    if len(words) > MAX_NAME_CHARACTERS:
        words = words[: MAX_NAME_CHARACTERS - 1] + "…"
    return json.dumps(words, ensure_ascii=False)


def clean(text: str) -> str:
    """A page's text as it is shown, without the quotes."""
    words: str = json.loads(quoted(text))
    return words


@dataclass(frozen=True, slots=True)
class PageElement:
    """Something on a page that can be used."""

    role: str
    name: str
    value: str | None = None
    states: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    node: int = 0
    """How the page itself knows it."""

    def __str__(self) -> str:
        parts = [self.role, quoted(self.name)]
        if self.value is not None:
            parts.append(f"= {quoted(self.value)}")
        if self.options:
            shown = [quoted(option) for option in self.options[:MAX_OPTIONS]]
            more = [f"and {len(self.options) - MAX_OPTIONS} more"] if len(self.options) > MAX_OPTIONS else []
            parts.append(f"of {', '.join(shown + more)}")
        return " ".join([*parts, *(f"({state})" for state in self.states)])


@dataclass(frozen=True, slots=True)
class PageText:
    """Something on a page that can only be read."""

    text: str
    kind: str = "text"

    def __str__(self) -> str:
        return f"{self.kind} {quoted(self.text)}"


Part = PageElement | PageText
#: Parts that stand beside each other: one, or the cells of a row.
Line = Sequence[Part]


class PageView:
    """A page at one moment. Elements are numbered from 1, in the order of the page."""

    def __init__(self, lines: Iterable[Line]) -> None:
        self.elements: list[PageElement] = []
        self.lines: list[str] = []
        for line in lines:
            self._add([self._show(part) for part in line], in_row=len(line) > 1)

    def element(self, number: int) -> PageElement | None:
        return self.elements[number - 1] if 0 < number <= len(self.elements) else None

    def number(self, role: str, name: str) -> int | None:
        """The number of the first element with a role and a name."""
        wanted = (role, clean(name))
        matches = (index for index, one in enumerate(self.elements, 1) if (one.role, clean(one.name)) == wanted)
        return next(matches, None)

    def text(self, first: int = 0) -> str:
        """The lines from `first` on, as many as are shown at once."""
        shown = self.lines[first : first + MAX_LINES]
        above = min(first, len(self.lines))
        below = max(len(self.lines) - first - MAX_LINES, 0)
        if above:
            shown.insert(0, f"({above} more lines above: scroll up)")
        if below:
            shown.append(f"({below} more lines below: scroll down)")
        return "\n".join(shown) or EMPTY

    def scrolled(self, first: int, direction: str) -> int:
        """The line that is the first one after scrolling."""
        last = max(len(self.lines) - MAX_LINES, 0)
        step = MAX_LINES - OVERLAP
        return min(first + step, last) if direction == "down" else max(first - step, 0)

    def _show(self, part: Part) -> str:
        if isinstance(part, PageText):
            return str(part)
        self.elements.append(part)
        return f"[{len(self.elements)}] {part}"

    def _add(self, shown: list[str], *, in_row: bool) -> None:
        # In a row, the word "text" before each cell says nothing.
        row = f"row {' | '.join(part.removeprefix('text ') for part in shown)}" if in_row else ""
        self.lines += [row] if in_row and len(row) <= MAX_ROW_CHARACTERS else shown
