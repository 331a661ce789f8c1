"""Notes in a prompt: at the end of the system message, a line for each.

They stand there as plain instructions. Under a heading that says where they come from, a small model keeps to them half
as often (docs/results/notes.md).
"""

from collections.abc import Sequence

from openclaw_rl.rendering.chat import Message, content_text

SYSTEM_ROLES = ("system", "developer")


def with_notes(messages: Sequence[Message], notes: Sequence[str], default_system: str = "") -> list[Message]:
    """A conversation with notes at the end of its first system message.

    What stands before them stays as it is, so that a cached prefix is used. If there is no system message, one is
    added, which begins with the text that the model's template would write in its place (`default_system`).
    """
    block = "\n".join(notes)
    place = next((i for i, message in enumerate(messages) if message["role"] in SYSTEM_ROLES), None)
    if place is None:
        return [{"role": "system", "content": joined(default_system, block)}, *messages]
    text = content_text(messages[place].get("content"))
    return [*messages[:place], {**messages[place], "content": joined(text, block)}, *messages[place + 1 :]]


def joined(text: str, block: str) -> str:
    return f"{text}\n\n{block}" if text else block
