"""What a request is, from the request alone: a turn to learn from, or something that a client does for itself.

The signs are those of OpenClaw, whose heartbeats, summaries and titles look like chats; any other client's request
is a main turn if it ends with a user's or a tool's message.
"""

from collections.abc import Sequence

from openclaw_rl.rendering.chat import Message, content_text
from openclaw_rl.rendering.clients import TRANSIENT, without_time
from openclaw_rl.types import TurnKind

#: In the system prompt of every agent request of OpenClaw.
OPENCLAW = "openclaw:attempt:STABLE"
#: What OpenClaw puts before a person's words when it sends them again after an error.
QUEUED = "[Queued user message from a previous active turn"

#: System prompts of requests that serve the client, with what they are.
SYSTEM_SIGNS = (
    ("You are a context summarization assistant", "compaction"),
    ("Generate a concise session title", "session title"),
    ("Current model identity", "one-off inference"),
)
Verdict = tuple[TurnKind, str]


def is_transient(message: Message) -> bool:
    """Whether a message is added to one request only."""
    return message["role"] == "user" and content_text(message.get("content")).startswith(TRANSIENT)


def classify(messages: Sequence[Message], tools: bool) -> Verdict:
    """Main or side, and why in words."""
    system = "\n".join(content_text(m.get("content")) for m in messages if m["role"] in ("system", "developer"))
    if not tools:
        for sign, what in SYSTEM_SIGNS:
            if system.startswith(sign):
                return TurnKind.SIDE, what
    real = [message for message in messages if not is_transient(message)]
    if not real or real[-1]["role"] not in ("user", "tool"):
        return TurnKind.SIDE, "no user or tool message at the end"
    asked = next((content_text(m.get("content")) for m in reversed(real) if m["role"] == "user"), "")
    return classify_words(asked, OPENCLAW in system)


def classify_words(asked: str, openclaw: bool) -> Verdict:
    """By the last thing a user, or a client in a user's name, said."""
    words = without_time(asked)
    if "Pre-compaction memory flush." in asked:
        return TurnKind.SIDE, "memory flush"
    if words.startswith("[cron:"):
        return TurnKind.SIDE, "scheduled run"
    if "[Inter-session message]" in asked and "isUser=false" in asked:
        return TurnKind.SIDE, "message of another session"
    if words.startswith(QUEUED):
        return TurnKind.MAIN, "message sent again"
    if openclaw and words == asked:
        return TurnKind.SIDE, "heartbeat or system event"
    if words.startswith("[Subagent Context]"):
        return TurnKind.MAIN, "subagent"
    return TurnKind.MAIN, "chat"
