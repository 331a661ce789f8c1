"""Reads a next state by rules: whether people are content, correct, reject, repeat or move on.

It is deterministic and takes a few milliseconds. When in doubt it abstains (`ReplyKind.UNCLEAR`).
Phrases are compiled at their first use, which takes seconds. On an event loop, await `ready` first.
"""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.judge.reader.instructions import all_instructions, instruct
from openclaw_rl.judge.reader.kinds import Reading, ReplyKind
from openclaw_rl.judge.reader.phrasebook import all_languages
from openclaw_rl.judge.reader.tools import read_tool_results
from openclaw_rl.judge.reader.users import read_user
from openclaw_rl.judge.reader.wish_grammar import all_grammars
from openclaw_rl.judge.reader.wishes import read_complaint, read_wishes
from openclaw_rl.rendering.chat import content_text

__all__ = ["Reading", "ReplyKind", "instruct", "read_reply", "read_wishes", "ready"]

_warming = threading.Lock()
_is_warm = threading.Event()

_TOOL_ROLES = frozenset({"tool", "function"})


def read_reply(request: str, response: str, next_state: Sequence[Mapping[str, Any]]) -> Reading:
    """Read the messages that came after `response`, which answered `request`.

    A user's words take precedence over tool results. Other roles are ignored.
    """
    user_texts = [text for text in texts(next_state, frozenset({"user"})) if text.strip()]
    if user_texts:
        message = "\n".join(user_texts)
        reading = read_user(request, response, message)
        return read_complaint(message, request, response) if reading.kind is ReplyKind.UNCLEAR else reading
    results = texts(next_state, _TOOL_ROLES)
    return Reading(read_tool_results(request, response, results) if results else ReplyKind.UNCLEAR)


def texts(messages: Sequence[Mapping[str, Any]], roles: frozenset[str]) -> list[str]:
    """The texts of the messages in some roles."""
    return [content_text(message.get("content")) for message in messages if message.get("role") in roles]


async def ready() -> None:
    """Return when all phrases are compiled. The first caller has it done in a thread, so that no request waits."""
    if not _is_warm.is_set():
        await asyncio.to_thread(_warm_up)


def _warm_up() -> None:
    """Compile all phrases, once. It takes seconds, in small steps, so that other threads go on."""
    with _warming:
        if not _is_warm.is_set():
            _compile_all()
            _is_warm.set()


def _compile_all() -> None:
    all_grammars()
    read_reply("", "run()", [{"role": "tool", "content": "Error: none"}])
    for language in all_languages():
        for phrases in language.signals.values():
            phrases.at_start.compile()
            phrases.anywhere.compile()
    for instructions in all_instructions():
        for instruction in instructions.listed:
            instruction.when.at_start.compile()
            instruction.when.anywhere.compile()
