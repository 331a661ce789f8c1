"""Reads a next state without a model: what people say when they are content, correct, reject, repeat or move on.

Deterministic and cheap (well under a millisecond). Abstains (`ReplyKind.UNCLEAR`) rather than guess.
The phrases are compiled where they are first needed, which takes time: `warm_up` does it before.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.judge.reader.instructions import all_instructions, instruct
from openclaw_rl.judge.reader.kinds import Reading, ReplyKind
from openclaw_rl.judge.reader.phrasebook import all_languages, all_scripts
from openclaw_rl.judge.reader.tools import read_tool_results
from openclaw_rl.judge.reader.users import read_user
from openclaw_rl.rendering.chat import content_text

__all__ = ["Reading", "ReplyKind", "instruct", "read_reply", "warm_up"]

_TOOL_ROLES = frozenset({"tool", "function"})


def read_reply(request: str, response: str, next_state: Sequence[Mapping[str, Any]]) -> Reading:
    """Read what came after `response`, which answered `request`; `next_state` are messages with role and content.

    A user's words decide over what tools returned; other roles say nothing.
    """
    said = [text for text in texts(next_state, frozenset({"user"})) if text.strip()]
    if said:
        return read_user(request, response, "\n".join(said))
    results = texts(next_state, _TOOL_ROLES)
    return Reading(read_tool_results(response, results) if results else ReplyKind.UNCLEAR)


def texts(messages: Sequence[Mapping[str, Any]], roles: frozenset[str]) -> list[str]:
    """What was said in some roles."""
    return [content_text(message.get("content")) for message in messages if message.get("role") in roles]


def warm_up() -> None:
    """Compile all phrases: seconds of work in small steps, so that a thread can do it while a server starts."""
    read_reply("", "run()", [{"role": "tool", "content": "Error: none"}])
    for language in (*all_scripts(), *all_languages()):
        for phrases in language.signals.values():
            phrases.at_start.compile()
            phrases.anywhere.compile()
    for own in all_instructions():
        for one in own.listed:
            one.when.at_start.compile()
            one.when.anywhere.compile()
