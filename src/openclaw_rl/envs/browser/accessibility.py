"""Chromium's accessibility tree as lines of a page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from openclaw_rl.envs.browser.view import Line, PageElement, PageText, Part

Node = Mapping[str, Any]
#: Nodes that are read; a page with more is not shown to its end.
MAX_NODES = 20_000
#: Chromium's names of roles that can be used → what the model reads.
USABLE = {
    **{
        role: role
        for role in (
            *("button", "link", "textbox", "searchbox", "combobox", "checkbox", "radio", "switch", "slider", "tab"),
            *("spinbutton", "menuitem", "menuitemcheckbox", "menuitemradio", "option", "treeitem"),
        )
    },
    "Date": "date",
    "DateTime": "date",
    "InputTime": "time",
    "ColorWell": "colour",
    "DisclosureTriangle": "summary",
    "DisclosureTriangleGrouped": "summary",
}
#: Chromium calls a small table one of the layout.
ROWS = frozenset({"row", "LayoutTableRow"})
#: Text-like roles with a name, which are shown on a line of their own.
NAMED = {"heading": "heading", "image": "image", "dialog": "dialog", "alertdialog": "dialog", "Iframe": "frame"}
#: States that are shown where they are true.
STATES = ("checked", "selected", "expanded", "pressed", "disabled")
#: Elements whose value is shown.
WITH_VALUE = frozenset({"textbox", "searchbox", "combobox", "spinbutton", "slider", "date", "time", "colour"})
#: Tags that hear clicks on behalf of the elements in them.
NOT_CLICKABLE = frozenset({"html", "body", "label", "option", "select", "#document"})


@dataclass(slots=True)
class Visit:
    """A node of the tree, and what stands around it."""

    node: Node
    parent: int | None
    """The place of its parent among the visits."""
    block: int
    """The nearest node that is shown: texts in the same block belong together."""
    row: int | None
    in_label: bool
    has_targets: bool = False
    """Whether something below it can be used."""


def read_tree(nodes: Sequence[Node], clickable: Mapping[int, str]) -> list[Line]:
    """The lines of a page. `clickable` has the nodes that listen for clicks, with a few words about each."""
    visits = list(walk(nodes))
    for visit in reversed(visits):
        if visit.parent is not None and (visit.has_targets or is_target(visit.node, clickable)):
            visits[visit.parent].has_targets = True
    return join(show(visits, clickable))


def walk(nodes: Sequence[Node]) -> Iterator[Visit]:
    """The nodes in the order of the page. Trees may be deep, and need not be trees."""
    tree = {node["nodeId"]: node for node in nodes[:MAX_NODES]}
    stack: list[tuple[Any, int | None, int, int | None, bool]] = [(nodes[0]["nodeId"], None, 0, None, False)]
    index = 0
    while stack:
        name, parent, block, row, in_label = stack.pop()
        node = tree.pop(name, None)
        if node is None:
            continue
        yield Visit(node, parent, block, row, in_label)
        role = role_of(node)
        below = (
            index,
            block if node.get("ignored") else index,
            index if role in ROWS else row,
            in_label or role == "LabelText",
        )
        stack += [(child, *below) for child in reversed(node.get("childIds", ()))]
        index += 1


def show(visits: Sequence[Visit], clickable: Mapping[int, str]) -> Iterator[tuple[Visit, Part]]:
    """The parts of the page, each with its visit. What is inside a shown element is not shown again."""
    closed: set[int] = set()
    for index, visit in enumerate(visits):
        if visit.parent in closed:
            closed.add(index)
            continue
        part = part_of(visits, index, clickable)
        if part is None:
            continue
        yield visit, part
        if not (isinstance(part, PageText) and visit.has_targets):
            closed.add(index)


def part_of(visits: Sequence[Visit], index: int, clickable: Mapping[int, str]) -> Part | None:
    visit = visits[index]
    node = visit.node
    role = role_of(visit.node)
    if role in USABLE and not node.get("ignored"):
        return element(visits, index, USABLE[role])
    if is_target(node, clickable) and not visit.has_targets:
        name = text_below(visits, index) or clickable[node["backendDOMNodeId"]]
        return PageElement("clickable", name, node=node["backendDOMNodeId"])
    if node.get("ignored"):
        return None
    name = name_of(node)
    if role == "StaticText":
        return PageText(name) if name.strip() and not visit.in_label else None
    if role in NAMED and name.strip() and (role != "heading" or not visit.has_targets):
        return PageText(name, NAMED[role])
    return None


def element(visits: Sequence[Visit], index: int, role: str) -> PageElement:
    node = visits[index].node
    states = {one["name"]: one["value"].get("value") for one in node.get("properties", ())}
    options = tuple(name_of(below.node) for below in descendants(visits, index) if role_of(below.node) == "option")
    return PageElement(
        role,
        name_of(node),
        value=str(node.get("value", {}).get("value", "")) if role in WITH_VALUE else None,
        states=tuple(state for state in STATES if states.get(state) in (True, "true")),
        options=options if role == "combobox" else (),
        node=node.get("backendDOMNodeId", 0),
    )


def join(parts: Iterator[tuple[Visit, Part]]) -> list[Line]:
    """Parts of the same row are one line; texts of the same block are one text."""
    lines: list[list[Part]] = []
    before: Visit | None = None
    for visit, part in parts:
        last = lines[-1][-1] if lines else None
        same_block = before is not None and before.block == visit.block
        if same_block and is_text(last) and is_text(part):
            lines[-1][-1] = PageText(f"{last.text}{part.text}")
        elif before is not None and visit.row is not None and visit.row == before.row:
            lines[-1].append(part)
        else:
            lines.append([part])
        before = visit
    return list(lines)


def is_text(part: Part | None) -> TypeGuard[PageText]:
    return isinstance(part, PageText) and part.kind == "text"


def is_target(node: Node, clickable: Mapping[int, str]) -> bool:
    """Whether a node can be used."""
    return (role_of(node) in USABLE and not node.get("ignored")) or node.get("backendDOMNodeId") in clickable


def descendants(visits: Sequence[Visit], index: int) -> Iterator[Visit]:
    inside = {index}
    for place in range(index + 1, len(visits)):
        if visits[place].parent not in inside:
            return
        inside.add(place)
        yield visits[place]


def text_below(visits: Sequence[Visit], index: int) -> str:
    below = (visit.node for visit in descendants(visits, index))
    return " ".join(name_of(node) for node in below if role_of(node) in ("StaticText", "image")).strip()


def role_of(node: Node) -> str:
    return str(node.get("role", {}).get("value", ""))


def name_of(node: Node) -> str:
    return str(node.get("name", {}).get("value") or "")


def clickable_nodes(snapshot: Mapping[str, Any]) -> dict[int, str]:
    """The nodes of a DOM snapshot's first document that listen for clicks, and what their tags say."""
    strings = snapshot["strings"]
    nodes = snapshot["documents"][0]["nodes"]
    clickable = {}
    for index in nodes.get("isClickable", {}).get("index", ()):
        tag = strings[nodes["nodeName"][index]].lower()
        if tag in NOT_CLICKABLE:
            continue
        words = [strings[word] if word >= 0 else "" for word in nodes["attributes"][index]]
        attributes = dict(zip(words[::2], words[1::2], strict=True))
        said = [attributes[name] for name in ("title", "alt", "class", "id", "fill") if attributes.get(name)]
        clickable[nodes["backendNodeId"][index]] = " ".join([tag, *said])
    return clickable
