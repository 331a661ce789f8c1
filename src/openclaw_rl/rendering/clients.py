"""Tells a person's words from the text that clients add to user messages or write by themselves.

Most patterns are those of OpenClaw 2026.9.6, some those of coding agents. Each is a positive sign: a
message without one is a person's. All of them take time proportional to the text, whatever it contains.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from openclaw_rl.rendering.chat import content_text
from openclaw_rl.rendering.memo import Memo

#: Begins a message that OpenClaw adds to the end of one request and does not keep in its history.
TRANSIENT = "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>>"
#: The time of a message, after its sender if a channel delivered it: `[Sun 2026-11-15 00:47 UTC] `,
#: `[WhatsApp +1555 Mon 2026-01-05 16:26:34 PST] `.
ENVELOPE = re.compile(
    r"\[(?:[^\[\]\n]{1,200} )?(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d{4}-\d\d-\d\d \d\d:\d\d(?::\d\d)? [^\]\n]{1,12}\] "
)
#: Names the session and the machine: `Runtime: agent=main | … | sessionId=… | …`.
RUNTIME = re.compile(r"^Runtime: .*\bsessionId=([\w.:-]+).*$", re.MULTILINE)
#: Marks the headings of blocks about the channel, the sender and the conversation.
CONTEXT_MARK = "⟦openclaw:ctx⟧"
#: What stands before a person's words: that they are sent again, what the client did in between, where they come from.
PREAMBLE = re.compile(
    r"\s{0,8}+(?:"
    r"\[Queued user message from a previous active turn[^\]\n]*\]"
    r"|\[OpenClaw (?:heartbeat poll|cron wake|session event|exec completion)\](?:\nDisable automatic completion[^\n]*)?"
    r"|Delivery: (?:to send a message, use|Final assistant text is not|No visible reply is)[^\n]*"
    rf"|[^\n]{{1,200}} {CONTEXT_MARK}[ \t]*\n(?:```json\n.*?(?:\n```(?=\s)|\Z)|(?:[^\n]+(?:\n|\Z))*)"
    r"|Context:\n<active_memory_plugin>\n.*?(?:</active_memory_plugin>|\Z)"
    r")(?:[ \t]*\n+|[ \t]+|\Z|(?<=\n))",
    re.DOTALL,
)
#: How many of them are looked for.
MAX_PREAMBLES = 16
#: The last line of a message if the client asks again by itself.
ASKED_AGAIN = re.compile(
    r"The previous (?:attempt|assistant turn) [^\n]{1,100}user-visible answer\. Continue from "
    r"|Continue the current task from the existing transcript, preserving completed work\."
    r"|\[Your previous response had no visible output\. Please continue and produce a user-visible response\.\]"
)
#: From here to the end, an extension of the client wants the answer changed.
REVISION = (
    "Before accepting the previous final answer, apply this revision request and produce the revised final answer."
)
#: How the messages begin that OpenClaw writes by itself and gives no time.
WAKE_UP = re.compile(
    r"Follow the heartbeat monitor |Read HEARTBEAT\.md if it exists|Run the following periodic tasks \(only those due"
    r"|A scheduled reminder has been triggered\. The reminder content is:|A scheduled cron event was triggered, but"
    r"|An async command completion event was |An async command you ran earlier "
)
#: Ends every wake-up message, also one whose text the owner has chosen.
WAKE_UP_TIME = re.compile(
    r"^Current time: [^\n]{1,100} \([^)\n]{1,60}\)\nReference UTC: \d{4}-\d\d-\d\d \d\d:\d\d UTC\Z", re.MULTILINE
)
#: More characters than `WAKE_UP_TIME` can match.
WAKE_UP_TIME_CHARACTERS = 300
#: Orders to the client. The last ones only without arguments, because a person's sentence may begin with such a path.
COMMAND = re.compile(
    r"/(?:compact|new|reset|clear|stop|restart|status|help|commands|whoami|models?|think|thinking|verbose|reasoning"
    r"|elevated|fast|queue|usage|btw|subagents|allowlist|approve|activation|export-session|export-trajectory)"
    r"(?:[ :][^\n]*)?"
    r"|/(?:agents|bash|config|context|debug|diagnostics|exec|export|goal|id|mcp|plugins?|session|skill|tasks|tools"
    r"|trace|tts)"
)
#: Stands for the part of a conversation that the client has left out.
SUMMARY = "summary of the conversation"
#: Says where an agent runs and what its owner's files demand.
CONTEXT = "context of the client"
#: How other messages of the client begin, and what they are for.
CLIENT_MESSAGES = (
    ("The conversation history before this point was compacted into the following summary:", SUMMARY),
    ("Pre-compaction memory flush.", "memory flush"),
    ("[cron:", "scheduled run"),
    ("A new session was started via /new or /reset", "session start"),
    # Claude Code
    ("This session is being continued from a previous conversation", SUMMARY),
    ("[SUGGESTION MODE", "suggestion of a message"),
    ("<policy_spec>", "check of a command"),
    # Codex
    ("Another language model started to solve this problem", SUMMARY),
    ("You are performing a CONTEXT CHECKPOINT COMPACTION", "compaction"),
)
#: Claude Code asks for a summary with these words, after a varying beginning of at most so many characters.
SUMMARY_TASK = "create a detailed summary of the conversation"
SUMMARY_TASK_WITHIN = 1500
#: The requests that Open WebUI writes by itself begin with the first and have one of the others.
TASK = "### Task:\n"
TASK_PARTS = ("### Output:", "<chat_history>")
#: Coding agents (Claude Code, Codex) surround a person's words with blocks. This one comes and goes from request to
#: request, also in older messages.
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
#: How much memory the words of messages may take: each request asks several times for those of its last messages.
MAX_WORDS_BYTES = 4_000_000
_WORDS = Memo[str, str](MAX_WORDS_BYTES, lambda text, words: sys.getsizeof(text) + sys.getsizeof(words))
#: How opencode names itself in the header User-Agent.
OPENCODE = "opencode/"
#: A message of `opencode run`, which puts a backslash before the quotes in it.
QUOTED = re.compile(r'"((?:[^"]|(?<=\\)")*)"|“([^“”]*)”')


def user_words(text: str) -> str:
    """The words of a user message that a person wrote; empty if the client wrote all of it."""
    words = _WORDS.get(text)
    if words is None:
        words = find_words(text)
        _WORDS.put(text, words)
    return words


def find_words(text: str) -> str:
    if text.startswith(TRANSIENT):
        return ""
    begin, end = words_between(text)
    text = without_runtime(text[begin:end])
    start = after_time(text, 0)
    for _ in range(MAX_PREAMBLES):
        preamble = PREAMBLE.match(text, start)
        if preamble is None:
            break
        start = after_time(text, preamble.end())
    return text[start : end_of_words(text, start)]


def after_time(text: str, start: int) -> int:
    """Where a message begins whose time may stand at `start`."""
    envelope = ENVELOPE.match(text, start)
    return envelope.end() if envelope else start


def without_runtime(text: str) -> str:
    before, separator, line = text.rpartition("\nRuntime: ")
    # Only at the very end: anywhere else, the user has quoted such a line.
    is_last = separator and RUNTIME.fullmatch(f"Runtime: {line.rstrip()}")
    return before.rstrip() if is_last else text


def end_of_words(text: str, start: int) -> int:
    """Where the client's text after a person's words begins."""
    last_line = text.rfind("\n", start, len(text.rstrip())) + 1 or start
    ends = [last_line] if ASKED_AGAIN.match(text, last_line) else []
    ends += [at for at in (text.find(REVISION, start), text.find(f"Context: {CONTEXT_MARK}\n", start)) if at >= 0]
    ends = [at for at in ends if at == start or text[at - 1] == "\n"]
    return len(text[: min(ends)].rstrip()) if ends else len(text)


def client_purpose(text: str) -> str | None:
    """What a user message is for that the client wrote, or that orders the client something; None for other words."""
    words = user_words(text)
    first_line = words.partition("\n")[0]
    if first_line.startswith("[Inter-session message]") and "isUser=false" in first_line:
        return "message of another session"
    if COMMAND.fullmatch(words.strip()):
        return "command to the client"
    for beginning, purpose in CLIENT_MESSAGES:
        if words.startswith(beginning):
            return purpose
    if SUMMARY_TASK in words[:SUMMARY_TASK_WITHIN]:
        return "compaction"
    if words.startswith(TASK) and any(part in words for part in TASK_PARTS):
        return "task of the client"
    if is_context(text):
        return CONTEXT
    if not words:
        return "heartbeat or system event" if "[OpenClaw " in text and not text.startswith(TRANSIENT) else None
    # OpenClaw gives the time of what a person wrote, unless it contains a time already.
    wakes_up = WAKE_UP.match(words) or WAKE_UP_TIME.search(words.rstrip()[-WAKE_UP_TIME_CHARACTERS:])
    return "heartbeat or system event" if wakes_up and not ENVELOPE.match(text) else None


def is_passing(message: Mapping[str, Any]) -> bool:
    """Whether a message is the client's alone and is not in the history of its next request."""
    text = content_text(message.get("content")) if message["role"] == "user" else ""
    return after_time(text, 0) < len(text) and not user_words(text) and client_purpose(text) is None


def message_words(message: Mapping[str, Any]) -> str:
    """A message's text; of a user's message, only what a person wrote."""
    text = content_text(message.get("content"))
    return user_words(text) if message["role"] == "user" else text


def without_quotes(words: str) -> str:
    """What a person said with `opencode run "…"`, which sends the quotes too. Quotes around a part stay."""
    quoted = QUOTED.fullmatch(words.strip())
    return (quoted[1] or quoted[2] or "").replace('\\"', '"') if quoted else words


def words_between(text: str) -> tuple[int, int]:
    """Where the words between the blocks of coding agents begin and end; the whole text if there are no blocks.

    Blocks are taken from the beginning and the end only: in between, a person has quoted one.
    """
    start = 0
    end = len(text)
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
