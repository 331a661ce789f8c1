"""Tells main turns, which can be trained on, from side turns, which a client makes for its own purposes.

The patterns are those of OpenClaw, whose heartbeats, summaries and titles look like chats. A request of any other
client is a main turn if it ends with a message of the user or a tool.
"""

from collections.abc import Mapping, Sequence

from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.rendering.chat import Message, content_text
from openclaw_rl.rendering.clients import TRANSIENT, without_time
from openclaw_rl.types import TurnKind

#: Every agent request of OpenClaw has this in its system prompt.
OPENCLAW_MARKER = "openclaw:attempt:STABLE"
#: OpenClaw puts this before a user's message when it sends the message again after an error.
QUEUED_PREFIX = "[Queued user message from a previous active turn"

#: How the system prompts of side turns begin, and what these turns are for.
SIDE_TURN_PROMPTS = (
    ("You are a context summarization assistant", "compaction"),
    ("Generate a concise session title", "session title"),
    ("Current model identity", "one-off inference"),
)
#: Main or side, and the reason.
Classification = tuple[TurnKind, str]


def kind_of(headers: Mapping[str, str], request: ChatRequest, messages: Sequence[Message]) -> Classification:
    """What the client says the turn is; if it says nothing, what the turn looks like."""
    said = (headers.get("x-turn-type") or request.turn_type or "").lower()
    if said in (TurnKind.MAIN, TurnKind.SIDE):
        return TurnKind(said), "the client said so"
    return classify(messages, bool(request.tools))


def is_transient(message: Message) -> bool:
    """Whether the client adds the message to one request only and does not keep it in its history."""
    return message["role"] == "user" and content_text(message.get("content")).startswith(TRANSIENT)


def classify(messages: Sequence[Message], tools: bool) -> Classification:
    """Main or side, judged by the messages."""
    system = "\n".join(content_text(m.get("content")) for m in messages if m["role"] in ("system", "developer"))
    if not tools:
        for beginning, purpose in SIDE_TURN_PROMPTS:
            if system.startswith(beginning):
                return TurnKind.SIDE, purpose
    kept = [message for message in messages if not is_transient(message)]
    if not kept or kept[-1]["role"] not in ("user", "tool"):
        return TurnKind.SIDE, "no user or tool message at the end"
    last_user_text = next((content_text(m.get("content")) for m in reversed(kept) if m["role"] == "user"), "")
    return classify_user_text(last_user_text, OPENCLAW_MARKER in system)


def classify_user_text(text: str, openclaw: bool) -> Classification:
    """Main or side, judged by the last user message. `openclaw`: whether the client is OpenClaw."""
    words = without_time(text)
    if "Pre-compaction memory flush." in text:
        return TurnKind.SIDE, "memory flush"
    if words.startswith("[cron:"):
        return TurnKind.SIDE, "scheduled run"
    if "[Inter-session message]" in text and "isUser=false" in text:
        return TurnKind.SIDE, "message of another session"
    if words.startswith(QUEUED_PREFIX):
        return TurnKind.MAIN, "message sent again"
    if openclaw and words == text:
        return TurnKind.SIDE, "heartbeat or system event"
    if words.startswith("[Subagent Context]"):
        return TurnKind.MAIN, "subagent"
    return TurnKind.MAIN, "chat"
