"""Keys as Chromium's DevTools protocol wants them."""

from typing import Any

#: Key → its Windows key code and the text that it enters.
CODES = {
    "Enter": (13, "\r"),
    "Tab": (9, ""),
    "Escape": (27, ""),
    "Backspace": (8, ""),
    "Delete": (46, ""),
    "Space": (32, " "),
    "Home": (36, ""),
    "End": (35, ""),
    "PageUp": (33, ""),
    "PageDown": (34, ""),
    "ArrowLeft": (37, ""),
    "ArrowUp": (38, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
}


def key_event(key: str, kind: str) -> dict[str, Any]:
    """The parameters of one event of a key, keyDown or keyUp."""
    code, text = CODES[key]
    event: dict[str, Any] = {"key": text if text == " " else key, "code": key, "windowsVirtualKeyCode": code}
    return event | {"text": text, "unmodifiedText": text} if text and kind == "keyDown" else event
