"""Reads a next state by rules: whether people are content, correct, reject, repeat or move on, and what they wish.

It is deterministic and takes a few milliseconds. When in doubt it abstains (`ReplyKind.UNCLEAR`).
Phrases are compiled at their first use, which takes seconds. On an event loop, await `ready` first.
"""

import asyncio
import re
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.judge.rules.comparison import content_words
from openclaw_rl.judge.rules.grammar import all_grammars
from openclaw_rl.judge.rules.instructions import all_form_rules, instruct
from openclaw_rl.judge.rules.phrases import all_languages
from openclaw_rl.judge.rules.tool_results import read_tool_results
from openclaw_rl.judge.rules.verdict import NEGATIVE, Reading, ReplyKind, read_user
from openclaw_rl.judge.rules.wishes import read_wish_as_complaint, read_wishes, split_wanted
from openclaw_rl.rendering.chat import content_text

__all__ = ["Reading", "ReplyKind", "instruct", "read_reply", "read_wishes", "ready", "split_wanted"]

#: How libraries that want typed answers (Instructor, pydantic-ai) say that one does not fit.
RE_ASK = re.compile(
    r"Correct your JSON ONLY RESPONSE, based on the following errors:|Validation Errors? found:\s"
    r"|\d+ validation errors?:\s+```json|Your previous response failed the application's validation\b"
)
_compiling = threading.Lock()
_compiled = threading.Event()


def read_reply(request: str, response: str, next_state: Sequence[Mapping[str, Any]]) -> Reading:
    """Read the messages that came after `response`, which answered `request`.

    A user's words take precedence over tool results. Other roles are ignored.
    """
    said = [text for text in texts(next_state, "user") if text.strip()]
    if said:
        message = "\n".join(said)
        if RE_ASK.match(message):
            return Reading(ReplyKind.REJECTION)
        reading = read_user(request, response, message)
        if reading.kind is not ReplyKind.UNCLEAR:
            return reading
        before, wanted = split_wanted(message)
        if wanted and is_better_answer(wanted, before, request, response):
            return Reading(ReplyKind.CORRECTION)
        return read_wish_as_complaint(message, request, response)
    results = texts(next_state, "tool", "function")
    return Reading(read_tool_results(request, response, results) if results else ReplyKind.UNCLEAR)


def is_better_answer(wanted: str, before: str, request: str, response: str) -> bool:
    """Whether a text is the answer that a user wanted. After other words than a complaint it may be material.

    Without any words before it, it must be about what was asked or answered.
    """
    if before.strip():
        return read_user(request, response, before).kind in NEGATIVE
    return bool(content_words(wanted) & content_words(f"{request}\n{response}"))


def texts(messages: Sequence[Mapping[str, Any]], *roles: str) -> list[str]:
    """The texts of the messages in some roles."""
    return [content_text(message.get("content")) for message in messages if message.get("role") in roles]


async def ready() -> None:
    """Return when all phrases are compiled. The first caller has it done in a thread, so that no request waits."""
    if not _compiled.is_set():
        await asyncio.to_thread(_compile_once)


def _compile_once() -> None:
    """Compile all phrases, once. It takes seconds, in small steps, so that other threads go on."""
    with _compiling:
        if not _compiled.is_set():
            for grammar in all_grammars():
                grammar.compile()
            read_reply("", "run()", [{"role": "tool", "content": "Error: none"}])
            for language in all_languages():
                for phrases in language.signals.values():
                    phrases.compile()
            for rules in all_form_rules():
                for rule in rules.rules:
                    rule.when.compile()
            _compiled.set()
