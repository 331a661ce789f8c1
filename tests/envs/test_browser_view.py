"""What the model sees of a page: numbered elements, and no page can write lines that look like ours."""

import re
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from openclaw_rl.envs.browser.accessibility import clickable_nodes, read_tree
from openclaw_rl.envs.browser.view import EMPTY, MAX_LINES, PageElement, PageText, PageView, clean, quoted

#: Every line that a view may contain; what a page says stands in quotes.
QUOTED = r'"(?:[^"\\]|\\.)*"'
PART = rf"(?:\[\d+\] [a-z]+ {QUOTED}[^\n]*|(?:text|heading|image|dialog|frame) {QUOTED}|{QUOTED})"
LINE = re.compile(
    rf"(?:row )?{PART}(?: \| {PART})*|\(\d+ more lines (?:above: scroll up|below: scroll down)\)|\(an empty page\)"
)


def node(
    name: Any, role: str, text: str = "", *children: Any, ignored: bool = False, **properties: Any
) -> dict[str, Any]:
    """A node as Chromium writes it, with the ids of its children."""
    return {
        "nodeId": str(name),
        "ignored": ignored,
        "role": {"value": role},
        "name": {"value": text},
        "backendDOMNodeId": name,
        "childIds": [str(child) for child in children],
        "properties": [{"name": key, "value": {"value": value}} for key, value in properties.items()],
    }


def shown(*nodes: dict[str, Any], clickable: dict[int, str] | None = None) -> list[str]:
    return PageView(read_tree(nodes, clickable or {})).lines


def test_elements_are_numbered_and_texts_are_not() -> None:
    field = node(4, "textbox", "Name ", 5) | {"value": {"value": "Ada"}}
    assert shown(
        node(1, "RootWebArea", "Shop", 2, 3, 4, 6),
        node(2, "heading", "Shop", 20),
        node(20, "StaticText", "Shop"),
        node(3, "StaticText", "Welcome"),
        field,
        node(5, "StaticText", "Ada"),
        node(6, "checkbox", "Agree", checked="true", disabled=True),
    ) == ['heading "Shop"', 'text "Welcome"', '[1] textbox "Name" = "Ada"', '[2] checkbox "Agree" (checked) (disabled)']


def test_a_list_shows_its_options_and_its_value() -> None:
    (line,) = shown(
        node(1, "RootWebArea", "", 2),
        node(2, "combobox", "Size", 3) | {"value": {"value": "M"}},
        node(3, "MenuListPopup", "", 4, 5),
        node(4, "option", "S"),
        node(5, "option", "M", selected=True),
    )
    assert line == '[1] combobox "Size" = "M" of "S", "M"'


def test_a_row_is_one_line_and_texts_of_a_block_are_one_text() -> None:
    assert shown(
        node(1, "RootWebArea", "", 2, 7),
        node(2, "LayoutTableRow", "", 3, 4),
        node(3, "cell", "", 5),
        node(4, "cell", "", 6),
        node(5, "StaticText", "Ada"),
        node(6, "link", "Open"),
        node(7, "generic", "", 8, 9),
        node(8, "StaticText", "one "),
        node(9, "StaticText", "two"),
    ) == ['row "Ada" | [1] link "Open"', 'text "one two"']


def test_what_listens_for_clicks_is_an_element_unless_it_contains_one() -> None:
    tree = [
        node(1, "RootWebArea", "", 2, 5),
        node(2, "generic", "", 3),
        node(3, "generic", "", 4),
        node(4, "StaticText", "more"),
        node(5, "generic", "", ignored=True),
    ]
    assert shown(*tree, clickable={2: "div", 3: "span", 5: "div red"}) == [
        '[1] clickable "more"',
        '[2] clickable "div red"',
    ]


def test_labels_are_not_shown_twice() -> None:
    assert shown(
        node(1, "RootWebArea", "", 2),
        node(2, "LabelText", "", 3, 4),
        node(3, "StaticText", "City"),
        node(4, "textbox", "City"),
    ) == ['[1] textbox "City" = ""']


def test_a_tree_that_is_very_deep_or_no_tree_is_read() -> None:
    deep = [node(number, "generic", "", number + 1) for number in range(1, 15_000)]
    assert shown(*deep, node(15_000, "button", "Deep")) == ['[1] button "Deep"']
    assert shown(node(1, "RootWebArea", "", 2, 2, 1, 99), node(2, "button", "Once", 1)) == ['[1] button "Once"']


def test_a_snapshot_says_what_listens_for_clicks() -> None:
    strings = ["DIV", "BODY", "class", "red", "circle"]
    nodes = {
        "nodeName": [1, 0, 4],
        "backendNodeId": [10, 11, 12],
        "attributes": [[], [2, 3], []],
        "isClickable": {"index": [0, 1, 2]},
    }
    assert clickable_nodes({"strings": strings, "documents": [{"nodes": nodes}]}) == {11: "div red", 12: "circle"}


TEXTS = st.text(max_size=200)
PARTS = st.one_of(
    st.builds(PageText, TEXTS),
    st.builds(
        PageElement,
        st.sampled_from(["button", "link"]),
        TEXTS,
        st.none() | TEXTS,
        options=st.lists(TEXTS, max_size=30).map(tuple),
    ),
)


@given(lines=st.lists(st.lists(PARTS, min_size=1, max_size=4), max_size=80), first=st.integers(0, 100))
@settings(deadline=None)
def test_whatever_a_page_says_each_line_is_one_of_ours(lines: list[list[Any]], first: int) -> None:
    view = PageView(lines)
    elements = [part for line in lines for part in line if isinstance(part, PageElement)]
    assert view.elements == elements
    text = view.text(first)
    assert len(text.split("\n")) <= MAX_LINES + 2
    assert text.splitlines() == text.split("\n")
    for line in text.split("\n"):
        assert LINE.fullmatch(line), line
        assert len(line) < 10_000
    numbers = [int(number) for line in view.lines for number in re.findall(r"(?:^|\| |row )\[(\d+)\] ", line)]
    assert numbers[: len(elements)] == sorted(numbers)[: len(elements)]


@given(text=st.text())
def test_a_text_is_quoted_on_one_line(text: str) -> None:
    assert re.fullmatch(QUOTED, quoted(text))
    assert quoted(clean(text)) == quoted(text)
    assert quoted(text).isprintable()


def test_a_long_page_is_scrolled() -> None:
    view = PageView([[PageText(f"line {number}")] for number in range(100)])
    top = view.text().split("\n")
    assert (top[0], top[-1]) == ('text "line 0"', "(40 more lines below: scroll down)")
    first = view.scrolled(0, "down")
    end = view.text(first).split("\n")
    assert (end[0], end[-1]) == ("(40 more lines above: scroll up)", 'text "line 99"')
    assert view.scrolled(first, "down") == first
    assert view.scrolled(first, "up") == 0
    assert PageView([]).text() == EMPTY


def test_a_long_row_is_shown_as_lines() -> None:
    cells = [PageText("x" * 150), PageText("y" * 150), PageText("z" * 150), PageElement("link", "Open")]
    lines = PageView([cells]).lines
    assert [line[:6] for line in lines] == ['text "', 'text "', 'text "', "[1] li"]


def test_elements_are_found_by_number_and_by_name() -> None:
    view = PageView([[PageElement("button", "Save "), PageElement("link", "Save")]])
    assert view.number("link", "Save") == 2
    assert view.number("button", "Save") == 1
    assert view.number("button", "Open") is None
    assert [view.element(number) and number for number in (0, 1, 2, 3)] == [None, 1, 2, None]
