"""What a client says about a request: main or side turn, its session, its episode.

Main turns can be trained on; side turns are made by a client for itself. A request is a main turn if it ends with a
message of the user or a tool, unless a positive sign says otherwise: titles, summaries, heartbeats and probes look like
chats. The signs are those of OpenClaw, Claude Code, Codex, opencode, aider and Open WebUI.
"""

import re
from collections.abc import Mapping, Sequence
from uuid import uuid4

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import MAX_NAME_CHARACTERS, ChatRequest, JsonSchemaFormat
from openclaw_rl.rendering.chat import Message, content_text
from openclaw_rl.rendering.clients import CONTEXT, RUNTIME, client_purpose, is_passing, user_words
from openclaw_rl.rendering.context import SYSTEM_ROLES
from openclaw_rl.types import EpisodeMode, TurnKind

#: How the system prompts of side turns begin, and what these turns are for.
SIDE_TURN_PROMPTS = (
    ("You are a context summarization assistant", "compaction"),
    ("You are a helpful AI assistant tasked with summarizing conversations", "compaction"),
    ("*Briefly* summarize this partial conversation", "compaction"),
    ("Generate a concise session title", "session title"),
    ("You are a title generator", "session title"),
    ("You are an expert software engineer that generates concise", "commit message"),
    ("Current model identity", "one-off inference"),
)
#: Words anywhere in the system prompts of side turns.
SIDE_TURN_WORDS = (("isNewTopic", "session title"), ("You are a security monitor", "check of a command"))
#: How the last user messages of side turns begin. A person may write this too, but not in a request without tools.
SIDE_TURN_INPUTS = (("<session>", "session title"), ("<transcript>", "check of a command"))
#: Fields of a JSON answer that names a session, and nothing else.
TITLE_FIELDS = {"title", "isNewTopic", "branch", "emoji"}
#: What Codex names in its header: requests that no person reads the answer of.
SUBAGENT_HEADER = "x-openai-subagent"
SIDE_SUBAGENTS = {"compact": "compaction", "memory_consolidation": "memory"}
#: Claude Code sends this word to warm a cache.
WARM_UP = "Warmup"
#: A question this short, with room for one token in the answer, only looks whether the server answers.
MAX_PROBE_CHARACTERS = 12
#: Main or side, and the reason.
Classification = tuple[TurnKind, str]
#: OpenClaw adds a counter to a session's id. It rises when the history is cut; the session stays the same.
COUNTER = re.compile(r":\d+\Z")
#: A session's name, and where the name was found.
NamedSession = tuple[str, str]
#: Where the session of a request is found that names none.
FROM_HISTORY = "history"
EPISODE_HEADER = "x-episode"
#: Values of headers.
TRUE = ("1", "true", "yes")
FALSE = ("", "0", "false", "no")


def kind_of(
    headers: Mapping[str, str], request: ChatRequest, messages: Sequence[Message], *, in_episode: bool = False
) -> Classification:
    """What the client says the turn is; if it says nothing, what the turn looks like. Those of episodes are main."""
    said = (headers.get("x-turn-type") or request.turn_type or "").lower()
    if said in (TurnKind.MAIN, TurnKind.SIDE):
        return TurnKind(said), "the client said so"
    if in_episode:
        return TurnKind.MAIN, "episode"
    if purpose := SIDE_SUBAGENTS.get(headers.get(SUBAGENT_HEADER, "")) or purpose_of_request(request, messages):
        return TurnKind.SIDE, purpose
    return classify(messages, bool(request.tools))


def purpose_of_request(request: ChatRequest, messages: Sequence[Message]) -> str | None:
    """What a request is for whose fields show that it is a side turn."""
    if request.tools:
        return None
    wanted = request.response_format
    if isinstance(wanted, JsonSchemaFormat):
        fields = (wanted.json_schema.schema_ or {}).get("properties")
        if isinstance(fields, dict) and "title" in fields and fields.keys() <= TITLE_FIELDS:
            return "session title"
    text = content_text(messages[-1].get("content")) if len(messages) == 1 else ""
    is_short = 0 < len(text) <= MAX_PROBE_CHARACTERS and " " not in text
    return "probe" if is_short and (request.max_completion_tokens or request.max_tokens) == 1 else None


def classify(messages: Sequence[Message], tools: bool) -> Classification:
    """Main or side, judged by the messages."""
    if not tools and (purpose := purpose_of_system(messages)):
        return TurnKind.SIDE, purpose
    is_last = True
    for message in reversed(messages):
        text = text_of(message)
        purpose = client_purpose(text) if message["role"] == "user" else None
        # Claude Code sends what it says about its surroundings as a system message after the person's words.
        if message["role"] in SYSTEM_ROLES or purpose == CONTEXT or is_passing(message):
            continue
        if is_last and message["role"] not in ("user", "tool"):
            break
        is_last = False
        if message["role"] == "user":
            # If tool results come last, the user message before them says whose tool calls they are.
            return kind_of_words(user_words(text), purpose, tools)
    return (TurnKind.SIDE, "no user or tool message at the end") if is_last else (TurnKind.MAIN, "chat")


def kind_of_words(words: str, purpose: str | None, tools: bool) -> Classification:
    """Main or side, judged by the last words of the user and what they are for according to `client_purpose`."""
    if words.strip() == WARM_UP:
        purpose = "warm-up"
    elif purpose is None and not tools:
        purpose = next((purpose for beginning, purpose in SIDE_TURN_INPUTS if words.startswith(beginning)), None)
    if purpose:
        return TurnKind.SIDE, purpose
    return TurnKind.MAIN, "subagent" if words.startswith("[Subagent Context]") else "chat"


def purpose_of_system(messages: Sequence[Message]) -> str | None:
    """What a request without tools is for, according to its system prompt; None if that says nothing."""
    system = "\n".join(text_of(m) for m in messages if m["role"] in SYSTEM_ROLES)
    for beginning, purpose in SIDE_TURN_PROMPTS:
        if system.startswith(beginning):
            return purpose
    return next((purpose for words, purpose in SIDE_TURN_WORDS if words in system), None)


def text_of(message: Message) -> str:
    return content_text(message.get("content"))


def named_session(
    headers: Mapping[str, str], request: ChatRequest, messages: Sequence[Message], *, in_episode: bool = False
) -> NamedSession | None:
    """The session that the client names, the most explicit way first; None if it names none. Raises 400: too long."""
    given = headers.get("x-session-id")
    candidates = (
        # Environments number their episodes; what looks like OpenClaw's counter is part of the name.
        (given if in_episode else without_counter(given), "header X-Session-Id"),
        (request.session_id, "field session_id"),
        (headers.get("x-claude-code-session-id"), "header X-Claude-Code-Session-Id"),
        (without_counter(headers.get("x-session-affinity")), "header x-session-affinity"),
        (without_counter(request.prompt_cache_key), "field prompt_cache_key"),
        (runtime_session(messages), "OpenClaw's Runtime line"),
    )
    named = next(((name, source) for name, source in candidates if name), None)
    if named is not None:
        check_name(*named)
    return named


def check_name(name: str, source: str) -> None:
    """Raise 400 if a session's name is too long. It is not cut: two sessions could become one."""
    if len(name) > MAX_NAME_CHARACTERS:
        message = f"A session's name has at most {MAX_NAME_CHARACTERS} characters; this one ({source}) has {len(name)}."
        raise ApiError(400, message, code="name_too_long")


def without_counter(name: str | None) -> str:
    return COUNTER.sub("", name or "")


def runtime_session(messages: Sequence[Message]) -> str | None:
    """The id that OpenClaw writes into the first user message."""
    first = next((content_text(m.get("content")) for m in messages if m["role"] == "user"), "")
    # The client's line is the last one; the user may have pasted another.
    ids: list[str] = RUNTIME.findall(first)
    return ids[-1] if ids else None


def new_session_name() -> str:
    """A new name, for a conversation that the client did not name."""
    return f"s-{uuid4().hex[:12]}"


def episode_of(headers: Mapping[str, str], request: ChatRequest) -> EpisodeMode | None:
    """The mode of the request's episode; None if it is part of none. Raises 400 for what cannot be an episode."""
    value = (headers.get(EPISODE_HEADER) or "").strip().lower()
    if value in FALSE:
        return None
    if value != EpisodeMode.EVAL and value not in TRUE:
        raise ApiError(400, "X-Episode must be 1 or eval.", param="X-Episode")
    if not headers.get("x-session-id"):
        raise ApiError(400, "X-Episode needs the session's name in X-Session-Id.", param="X-Session-Id")
    if (request.n or 1) > 1:
        raise ApiError(400, "An episode takes one answer at a time: leave n out.", param="n")
    if request.store is False:
        raise ApiError(400, "An episode must be recorded: leave store out.", param="store")
    return EpisodeMode.EVAL if value == EpisodeMode.EVAL else EpisodeMode.TRAIN


def truthy(text: str | None) -> bool:
    return (text or "").strip().lower() in TRUE
