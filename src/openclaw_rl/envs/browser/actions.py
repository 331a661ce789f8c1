"""The actions of an answer: a tool call, or a line such as `click 2`."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openclaw_rl.envs.base import Message, Tool

#: Longer texts to type are refused.
MAX_TEXT_CHARACTERS = 2000
#: Element numbers with more digits are refused; no page has so many elements.
MAX_DIGITS = 6
#: Actions that need an element, and actions that need a text.
ON_ELEMENT = ("click", "type", "select")
WITH_TEXT = ("type", "select", "scroll", "press")
KINDS = ("click", "type", "select", "scroll", "press", "back", "done")
DIRECTIONS = ("down", "up")
#: The keys that can be pressed, by their lower-case name, as browsers name them.
KEYS = {
    key.lower(): key
    for key in (
        *("Enter", "Tab", "Escape", "Backspace", "Delete", "Space", "Home", "End", "PageUp", "PageDown"),
        *("ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"),
    )
}
FORMS = "click N, type N TEXT, select N OPTION, scroll down, scroll up, press KEY, back or done"
TOOL_NAME = "browser"
TOOL: Tool = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Do one action on the page.",
        "parameters": {
            "type": "object",
            "properties": {
                "action": {"type": "string", "enum": list(KINDS)},
                "element": {"type": "integer", "description": "The number of the element: click, type, select."},
                "text": {"type": "string", "description": "The text, the option, the key, or down or up."},
            },
            "required": ["action"],
        },
    },
}
#: A line that is an action, with the signs that models like to put around it.
LINE = re.compile(
    r"[\s>*`-]*(?:action\s*:\s*)?(?P<kind>click|type|select|scroll|press|back|done)\b"
    r"(?:\s*\[?(?P<element>\d+)\]?(?=[\s:.`*]|\Z))?:?(?P<text>.*?)[\s`*]*",
    re.IGNORECASE,
)


class BadAction(Exception):
    """An answer is not an action; the message is for the model."""


@dataclass(frozen=True, slots=True)
class BrowserAction:
    """One action. `text` is what to type, the option to select, the key to press, or the direction to scroll."""

    kind: str
    element: int | None = None
    text: str = ""

    def __str__(self) -> str:
        parts = [self.kind, "" if self.element is None else str(self.element), self.text]
        return " ".join(filter(None, parts))


def read_action(answer: Message) -> BrowserAction:
    """The first action of an answer. Raises BadAction."""
    if calls := tool_calls(answer):
        return _from_call(calls[0])
    content = answer.get("content")
    for line in content.splitlines() if isinstance(content, str) else ():
        if match := LINE.fullmatch(line):
            return _from_line(match)
    raise BadAction(f"There is no action in the answer. Write one of: {FORMS}.")


def tool_calls(answer: Message) -> Sequence[Any]:
    calls = answer.get("tool_calls")
    return calls if isinstance(calls, list) else ()


def _from_line(match: re.Match[str]) -> BrowserAction:
    kind = match["kind"].lower()
    number = match["element"]
    text = match["text"].strip()
    if number is not None and kind not in ON_ELEMENT:
        text = f"{number} {text}".strip()
        number = None
    if number is not None and len(number) > MAX_DIGITS:
        raise BadAction(f"There is no element {number[:MAX_DIGITS]}….")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1]
    return checked(kind, None if number is None else int(number), text)


def _from_call(call: Any) -> BrowserAction:
    function = call.get("function") if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(function, dict) or name != TOOL_NAME:
        raise BadAction(f"There is no tool {name!r:.40}; the tool is {TOOL_NAME}.")
    try:
        arguments = json.loads(function.get("arguments") or "")
    except (TypeError, ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise BadAction(f"The arguments of {TOOL_NAME} must be a JSON object.")
    kind = arguments.get("action")
    element = arguments.get("element")
    text = arguments.get("text", "")
    if kind not in KINDS:
        raise BadAction(f"The action must be one of {', '.join(KINDS)}, not {kind!r:.40}.")
    if element is not None and (isinstance(element, bool) or not isinstance(element, int)):
        raise BadAction(f"The element must be a number, not {element!r:.40}.")
    if not isinstance(text, str):
        raise BadAction(f"The text must be a string, not {text!r:.40}.")
    return checked(kind, element if kind in ON_ELEMENT else None, text.strip())


def checked(kind: str, element: int | None, text: str) -> BrowserAction:
    """An action with all that it needs, in one form. Raises BadAction."""
    if kind in ON_ELEMENT and element is None:
        raise BadAction(f"{kind} needs the number of an element, for example: {kind} 1{' TEXT' * (kind != 'click')}.")
    if len(text) > MAX_TEXT_CHARACTERS:
        raise BadAction(f"The text is longer than {MAX_TEXT_CHARACTERS} characters.")
    if kind == "scroll" and (text := text.lower() or "down") not in DIRECTIONS:
        raise BadAction(f"scroll takes down or up, not {text!r:.40}.")
    if kind == "press":
        if text.lower() not in KEYS:
            raise BadAction(f"There is no key {text!r:.40}; the keys are {', '.join(KEYS.values())}.")
        text = KEYS[text.lower()]
    if kind == "select" and not text:
        raise BadAction("select needs the name of an option.")
    # Unprintable characters, such as those that end a line, cannot be typed into a page.
    text = "".join(character for character in text if character.isprintable())
    return BrowserAction(kind, element, text if kind in WITH_TEXT else "")
