"""Blocks with which coding agents (Claude Code, Codex) surround a person's words in a user message.

They are taken from the beginning and the end only: in between, a person has quoted one. All of this takes time
proportional to the text, whatever it contains.
"""

#: Comes and goes from request to request, also in older messages.
REMINDER = "system-reminder"
#: Stays in the history: where the agent runs, what the owner's files say, commands to the client and their output.
CONTEXTS = (
    *("environment_context", "user_instructions", "INSTRUCTIONS", "turn_aborted", "user_shell_command", "skill"),
    *("local-command-caveat", "local-command-stdout", "local-command-stderr", "task-notification"),
    *("command-name", "command-message", "command-args", "bash-input", "bash-stdout", "bash-stderr"),
)
#: How these blocks begin and end.
OPENING_TAGS = tuple(f"<{name}>" for name in (REMINDER, *CONTEXTS))
CLOSING_TAGS = tuple(f"</{name}>" for name in (REMINDER, *CONTEXTS))
#: The line before a block of INSTRUCTIONS.
INSTRUCTIONS_HEADING = "# AGENTS.md instructions"
#: How many blocks are looked for on each side.
MAX_BLOCKS = 32


def words_between(text: str) -> tuple[int, int]:
    """Where the words between the blocks begin and end; the whole text if there are no blocks."""
    start, end = 0, len(text)
    for _ in range(MAX_BLOCKS):
        after = after_block(text, start, end)
        if after is None:
            break
        start = after
    for _ in range(MAX_BLOCKS):
        before = before_block(text, start, end)
        if before is None:
            break
        end = before
    return start, end


def after_block(text: str, start: int, end: int) -> int | None:
    """Where the text after a block goes on that begins at `start`, white space aside; None if none begins there."""
    first = start + leading_space(text, start, end)
    if text.startswith(INSTRUCTIONS_HEADING, first):
        line = text.find("\n", first, end)
        return end if line < 0 else line
    if not text.startswith(OPENING_TAGS, first):
        return None
    name = text[first + 1 : text.index(">", first)]
    close = text.find(f"</{name}>", first, end)
    if close < 0:
        return None
    after = close + len(name) + 3
    return after + leading_space(text, after, end)


def before_block(text: str, start: int, end: int) -> int | None:
    """Where the text before a block ends that ends at `end`, white space aside; None if none ends there."""
    last = end - trailing_space(text, start, end)
    if not text.endswith(CLOSING_TAGS, start, last):
        return None
    name = text[text.rindex("/", start, last) + 1 : last - 1]
    begin = text.rfind(f"<{name}>", start, last)
    return None if begin < 0 else begin - trailing_space(text, start, begin)


def leading_space(text: str, start: int, end: int) -> int:
    return end - start - len(text[start:end].lstrip())


def trailing_space(text: str, start: int, end: int) -> int:
    return end - start - len(text[start:end].rstrip())


def is_context(text: str) -> bool:
    """Whether a message is nothing but blocks, one of which stays in the history."""
    start, end = words_between(text)
    if start < end or not text.strip():
        return False
    return INSTRUCTIONS_HEADING in text or any(f"<{name}>" in text for name in CONTEXTS)
