"""What stands before a conversation in its prompt: notes as instructions, and examples as earlier exchanges."""

from collections.abc import Sequence

from openclaw_rl.rendering.chat import Message, content_text

#: The roles of messages that instruct the model.
SYSTEM_ROLES = ("system", "developer")
#: A shorter word of a scope must be a word of the request; this many letters may be a part of one.
MIN_PART_LETTERS = 4


def with_notes(messages: Sequence[Message], notes: Sequence[str], default_system: str = "") -> list[Message]:
    """A conversation with notes at the end of the system message that it begins with, a line for each.

    They stand there as instructions. Under a heading that says where they come from, a small model keeps to them half
    as often (docs/results/notes.md).

    What stands before them stays as it is, so that a cached prefix is used. If it does not begin with one, one is
    added, which begins with the text that the model's template would write in its place (`default_system`). A system
    message that comes later may be a new one, and prompts must extend each other.
    """
    if not notes:
        return list(messages)
    block = "\n".join(notes)
    if not messages or messages[0]["role"] not in SYSTEM_ROLES:
        return [{"role": "system", "content": joined(default_system, block)}, *messages]
    first, *others = messages
    return [{**first, "content": joined(content_text(first.get("content")), block)}, *others]


def joined(text: str, block: str) -> str:
    return f"{text}\n\n{block}" if text else block


def with_examples(messages: Sequence[Message], examples: Sequence[tuple[str, str]]) -> list[Message]:
    """A conversation with examples (a question and its answer) after the system messages that it begins with."""
    start = next((i for i, message in enumerate(messages) if message["role"] not in SYSTEM_ROLES), len(messages))
    exchanges = [
        {"role": role, "content": text}
        for question, answer in examples
        for role, text in (("user", question), ("assistant", answer))
    ]
    return [*messages[:start], *exchanges, *messages[start:]]


def applies(scope: frozenset[str], said: str, words: frozenset[str]) -> bool:
    """Whether a request has a word of a note's scope. `said` are its words without case, and `words` their stems.

    A longer word may be a part of another ("rezept" in "Nudelrezepte"), as all words of Chinese and Japanese are.
    """
    return any(
        stem in words or ((len(stem) >= MIN_PART_LETTERS or not stem.isascii()) and stem in said)
        for stem in scope
        if len(stem) > 1
    )
