"""Tells main turns, which can be trained on, from side turns, which a client makes for its own purposes.

A request is a main turn if it ends with a message of the user or a tool, unless a positive sign says otherwise:
OpenClaw's heartbeats, summaries and titles look like chats.
"""

from collections.abc import Mapping, Sequence

from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.rendering.chat import Message, content_text
from openclaw_rl.rendering.clients import client_purpose, is_passing, user_words
from openclaw_rl.types import TurnKind

#: How the system prompts of side turns begin, and what these turns are for.
SIDE_TURN_PROMPTS = (
    ("You are a context summarization assistant", "compaction"),
    ("Generate a concise session title", "session title"),
    ("Current model identity", "one-off inference"),
)
#: Main or side, and the reason.
Classification = tuple[TurnKind, str]


def kind_of(
    headers: Mapping[str, str], request: ChatRequest, messages: Sequence[Message], *, in_episode: bool = False
) -> Classification:
    """What the client says the turn is; if it says nothing, what the turn looks like. Those of episodes are main."""
    said = (headers.get("x-turn-type") or request.turn_type or "").lower()
    if said in (TurnKind.MAIN, TurnKind.SIDE):
        return TurnKind(said), "the client said so"
    return (TurnKind.MAIN, "episode") if in_episode else classify(messages, bool(request.tools))


def classify(messages: Sequence[Message], tools: bool) -> Classification:
    """Main or side, judged by the messages."""
    system = "\n".join(content_text(m.get("content")) for m in messages if m["role"] in ("system", "developer"))
    if not tools:
        for beginning, purpose in SIDE_TURN_PROMPTS:
            if system.startswith(beginning):
                return TurnKind.SIDE, purpose
    kept = [message for message in messages if not is_passing(message)]
    if not kept or kept[-1]["role"] not in ("user", "tool"):
        return TurnKind.SIDE, "no user or tool message at the end"
    # If tool results come last, the user message before them says whose tool calls they are.
    last_user_text = next((content_text(m.get("content")) for m in reversed(kept) if m["role"] == "user"), "")
    if own_purpose := client_purpose(last_user_text):
        return TurnKind.SIDE, own_purpose
    return TurnKind.MAIN, "subagent" if user_words(last_user_text).startswith("[Subagent Context]") else "chat"
