"""Side turns of Claude Code, Codex, opencode, aider and Open WebUI, and what these add to a person's words."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.api.capture.classify import classify, kind_of
from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.api.wires.messages import parse_messages
from openclaw_rl.rendering.clients import CONTEXTS, REMINDER, is_passing, user_words
from openclaw_rl.types import TurnKind

Messages = list[dict[str, Any]]

REMINDED = "<system-reminder>\nThe todo list is empty.\n</system-reminder>"
ENVIRONMENT = "<environment_context>\n  <cwd>/home/me</cwd>\n</environment_context>"
AGENTS = "# AGENTS.md instructions for /home/me\n\n<INSTRUCTIONS>\nUse tabs.\n</INSTRUCTIONS>"
CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "a.txt", "tool_call_id": "c1"}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


AGENT = system("You are a coding agent.")
CHAT = [AGENT, user("Fix the bug."), said("Done.")]
SUMMARISE = "Answer with text only.\n\nYour task is to create a detailed summary of the conversation so far."
#: What it is, messages, whether there are tools, the verdict and how its reason begins.
ROWS: list[tuple[str, Messages, bool, TurnKind, str]] = [
    ("first words", [AGENT, user(f"{REMINDED}\nFix the bug.")], True, TurnKind.MAIN, "chat"),
    ("words in context", [AGENT, user(AGENTS), user(ENVIRONMENT), user("Fix it.")], True, TurnKind.MAIN, "chat"),
    ("surroundings after words", [AGENT, user("Fix it."), system("# Environment\n…")], True, TurnKind.MAIN, "chat"),
    ("surroundings after a result", [AGENT, user("Fix it."), CALLS, RESULT, AGENT], True, TurnKind.MAIN, "chat"),
    ("only surroundings", [AGENT, system("# Environment\n…")], True, TurnKind.SIDE, "no user"),
    ("surroundings after an answer", [*CHAT, AGENT], True, TurnKind.SIDE, "no user"),
    ("tool loop", [AGENT, user("Fix it."), CALLS, RESULT], True, TurnKind.MAIN, "chat"),
    ("reminder after a result", [AGENT, user("Fix it."), CALLS, RESULT, user(REMINDED)], True, TurnKind.MAIN, "chat"),
    (
        "a turn that was stopped",
        [*CHAT, user("<turn_aborted>\nx\n</turn_aborted>"), user("No.")],
        True,
        TurnKind.MAIN,
        "c",
    ),
    ("only context", [AGENT, user(ENVIRONMENT)], True, TurnKind.SIDE, "no user"),
    ("only context after an answer", [*CHAT, user(ENVIRONMENT)], True, TurnKind.SIDE, "no user"),
    ("Claude Code compacts", [*CHAT, user(SUMMARISE)], True, TurnKind.SIDE, "compaction"),
    ("suggestion", [*CHAT, user("[SUGGESTION MODE: what next?]")], True, TurnKind.SIDE, "suggestion"),
    ("command check", [user("<policy_spec>\n# x\n</policy_spec>\nCommand: ls")], False, TurnKind.SIDE, "check"),
    ("topic", [system("x\nAnswer with isNewTopic and title."), user("hi")], False, TurnKind.SIDE, "session title"),
    ("title", [AGENT, user("<session>\nFix the bug.\n</session>")], False, TurnKind.SIDE, "session title"),
    ("warm-up", [AGENT, user("Warmup")], True, TurnKind.SIDE, "warm-up"),
    (
        "Codex compacts",
        [*CHAT, user("You are performing a CONTEXT CHECKPOINT COMPACTION.")],
        True,
        TurnKind.SIDE,
        "comp",
    ),
    ("opencode's title", [system("You are a title generator."), user("hi")], False, TurnKind.SIDE, "session title"),
    (
        "aider's commit",
        [system("You are an expert software engineer that generates concise, one-line messages."), user("diff")],
        False,
        TurnKind.SIDE,
        "commit message",
    ),
    ("Open WebUI's tags", [user("### Task:\nTags.\n### Output:\nJSON")], False, TurnKind.SIDE, "task of the client"),
    (
        "after a summary",
        [user("This session is being continued from a previous conversation."), user("Go on.")],
        True,
        TurnKind.MAIN,
        "chat",
    ),
    # What a person may well write.
    ("a person's task", [user("### Task:\nWrite a poem.")], False, TurnKind.MAIN, "chat"),
    ("a person's session", [AGENT, user("<session> is not defined, why?")], True, TurnKind.MAIN, "chat"),
    ("a quoted tag", [AGENT, user("What does <system-reminder> mean?")], True, TurnKind.MAIN, "chat"),
    ("a quoted block", [AGENT, user(f"Why do I see\n{REMINDED}\nin my log?")], True, TurnKind.MAIN, "chat"),
    ("a summary", [AGENT, user("Summarise the conversation, please.")], True, TurnKind.MAIN, "chat"),
    ("a warm-up", [AGENT, user("Warmup exercises?")], True, TurnKind.MAIN, "chat"),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_main_or_side_of_agents(row: tuple[str, Messages, bool, TurnKind, str]) -> None:
    _what, messages, tools, kind, reason = row
    verdict, why = classify(messages, tools)
    assert verdict is kind
    assert why.startswith(reason)


def kind(headers: dict[str, str] | None = None, **fields: Any) -> tuple[TurnKind, str]:
    request = ChatRequest(**{"messages": [user("hi")], **fields})
    return kind_of(headers or {}, request, fields.get("messages", [user("hi")]))


def test_a_probe_is_a_side_turn() -> None:
    assert kind(messages=[user("quota")], max_tokens=1) == (TurnKind.SIDE, "probe")
    assert kind(messages=[user("quota")])[0] is TurnKind.MAIN
    assert kind(messages=[user("Is this spam? Buy now!")], max_tokens=1)[0] is TurnKind.MAIN
    assert kind(messages=[user("count")], max_tokens=1, tools=TOOLS)[0] is TurnKind.MAIN


def test_an_answer_that_is_only_a_title_is_a_side_turn() -> None:
    def answer(*fields: str) -> dict[str, Any]:
        schema = {"type": "object", "properties": {field: {"type": "string"} for field in fields}}
        return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    assert kind(response_format=answer("title")) == (TurnKind.SIDE, "session title")
    assert kind(response_format=answer("title", "author"))[0] is TurnKind.MAIN


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("compact", TurnKind.SIDE),
        ("memory_consolidation", TurnKind.SIDE),
        ("review", TurnKind.MAIN),
        ("", TurnKind.MAIN),
    ],
)
def test_what_codex_says_in_its_header(name: str, expected: TurnKind) -> None:
    assert kind({"x-openai-subagent": name})[0] is expected
    assert kind({"x-openai-subagent": name, "x-turn-type": "main"})[0] is TurnKind.MAIN


BLOCKS = st.sampled_from([f"<{name}>x\ny</{name}>" for name in (REMINDER, *CONTEXTS)])


@given(
    st.lists(BLOCKS, max_size=4),
    st.sampled_from(["Fix the bug.", "a\n\nb", "<b>bold</b>"]),
    st.lists(BLOCKS, max_size=4),
)
def test_a_persons_words_between_blocks(before: list[str], words: str, after: list[str]) -> None:
    text = "\n".join([*before, words, *after])
    assert user_words(text).strip() == words


def test_a_client_that_asks_again_adds_no_words_of_a_person() -> None:
    again = "[Your previous response had no visible output. Please continue and produce a user-visible response.]"
    assert user_words(f"Fix it.\n{again}") == "Fix it."
    assert user_words(again) == ""
    assert user_words(f"Why do I see {again}?").endswith("?")


def test_a_reminder_alone_is_passing_and_context_is_not() -> None:
    assert is_passing(user(REMINDED))
    assert not is_passing(user(ENVIRONMENT))
    assert not is_passing(user(AGENTS))


@pytest.mark.parametrize("piece", ["<system-reminder>", "</system-reminder>", f"{REMINDED}\n", "<skill></skill>"])
def test_huge_messages_with_blocks_take_little_time(piece: str) -> None:
    text = piece * (2_000_000 // len(piece))
    assert user_words(text) in text
    classify([user(text)], False)


@pytest.mark.parametrize("in_blocks", [False, True])
def test_the_line_that_changes_with_every_request_is_left_out(in_blocks: bool) -> None:
    line = "x-anthropic-billing-header: cc_version=2.1.100; cch=eb6c6;"
    parts = [line, "You are an agent.", "Be brief."]
    given_system: Any = "\n".join([line, "You are an agent.\n\nBe brief."])
    if in_blocks:
        given_system = [{"type": "text", "text": part} for part in parts]
    request = parse_messages(json.dumps({"messages": [user("hi")], "system": given_system}).encode())
    assert request.message_dicts()[0] == system("You are an agent.\n\nBe brief.")
