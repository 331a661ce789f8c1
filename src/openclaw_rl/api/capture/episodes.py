"""Whether a request is part of an episode, according to the client."""

from collections.abc import Mapping

from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import MAX_NAME_CHARACTERS, ChatRequest
from openclaw_rl.types import EpisodeMode

HEADER = "x-episode"
TRUE, FALSE = ("1", "true", "yes"), ("", "0", "false", "no")


def episode_of(headers: Mapping[str, str], request: ChatRequest) -> EpisodeMode | None:
    """The mode of the request's episode; None if it is part of none. Raises 400 for what cannot be an episode."""
    value = (headers.get(HEADER) or "").strip().lower()
    if value in FALSE:
        return None
    if value != EpisodeMode.EVAL and value not in TRUE:
        raise ApiError(400, "X-Episode must be 1 or eval.", param="X-Episode")
    name = headers.get("x-session-id")
    if not name:
        raise ApiError(400, "X-Episode needs the session's name in X-Session-Id.", param="X-Session-Id")
    if len(name) > MAX_NAME_CHARACTERS:
        message = f"The X-Session-Id of an episode has at most {MAX_NAME_CHARACTERS} characters."
        raise ApiError(400, message, param="X-Session-Id")
    if (request.n or 1) > 1:
        raise ApiError(400, "An episode takes one answer at a time: leave n out.", param="n")
    if request.store is False:
        raise ApiError(400, "An episode must be recorded: leave store out.", param="store")
    return EpisodeMode.EVAL if value == EpisodeMode.EVAL else EpisodeMode.TRAIN


def truthy(text: str | None) -> bool:
    return (text or "").strip().lower() in TRUE
