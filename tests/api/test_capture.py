"""From HTTP requests to the ledger: sessions, exact tokens, next states, and what is kept out."""

import itertools
import json
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.api.options import ApiKey
from openclaw_rl.engines.base import EngineLimits
from openclaw_rl.types import Feedback, State, TurnKind
from support.harness import MODEL, running, wait_for
from support.recording import Recording

TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
OPENCLAW = {"role": "system", "content": "You are an agent. <!-- openclaw:attempt:STABLE -->"}


@pytest.fixture
def bench(recording: Recording) -> Recording:
    return recording


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def test_what_was_sampled_is_what_is_stored(bench: Recording) -> None:
    bench.say("hello fox", [user("hi")], temperature=0.5, logprobs=True, top_logprobs=2)
    (turn,) = bench.turns()
    assert turn.prompt_ids == list(bench.sampler.requests[0].prompt_ids)
    assert turn.response_ids == bench.script(bench.sampler.requests[0], 0)
    assert turn.logprobs == [-0.5] * len(turn.response_ids)
    assert turn.top is not None
    assert turn.top.ids.shape == turn.top.logprobs.shape == (len(turn.response_ids), 2)
    assert turn.sampling["temperature"] == 0.5
    assert turn.messages == [user("hi")]
    assert (turn.message["content"], turn.finish_reason, turn.state) == ("hello fox", "stop", State.AWAITING)
    assert turn.completion == bench.last_id


def test_streamed_answers_are_stored_before_their_last_piece_is_sent(bench: Recording) -> None:
    bench.says = "hello world"
    url = f"{bench.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={"messages": [user("hi")], "stream": True}) as response:
        for line in response.iter_lines():
            if '"finish_reason":"stop"' in line:
                assert len(bench.turns()) == 1
    assert bench.turns()[0].message["content"] == "hello world"


def test_a_tool_conversation_is_one_growing_sequence(bench: Recording) -> None:
    """Every stored prompt is the prompt, the response and the new part of the one before."""
    conversation = [{"role": "system", "content": "be brief"}, user("where is the fox?")]
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 5.0, "b": "x"}}\n</tool_call>'
    answers = [f"I look. {call}", call, "The fox is here.", "Bye."]
    after = [
        lambda m: {"role": "tool", "tool_call_id": m["tool_calls"][0]["id"], "content": "nothing (exit code 1)"},
        lambda m: {"role": "tool", "tool_call_id": m["tool_calls"][0]["id"], "content": "a fox"},
        lambda m: user("thanks"),
    ]
    for answer, what_comes in itertools.zip_longest(answers, after):
        message = bench.say(answer, conversation, tools=TOOLS)
        conversation = [*conversation, message]
        if what_comes:
            conversation.append(what_comes(message))
    turns = bench.turns()
    for before, turn in itertools.pairwise(turns):
        whole = before.prompt_ids + before.response_ids
        assert turn.prompt_ids[: len(whole)] == whole
        assert turn.prompt_ids == list(bench.sampler.requests[turns.index(turn)].prompt_ids)
    assert {turn.session for turn in turns} == {turns[0].session}
    assert [turn.continuation for turn in turns] == ["new", "realigned", "realigned", "realigned"]
    assert [[m["role"] for m in turn.next_state or []] for turn in turns] == [["tool"], ["tool"], ["user"], []]
    new_parts = [
        bench.renderer.tokenizer.backend.decode(b.prompt_ids[len(a.prompt_ids + a.response_ids) :])
        for a, b in itertools.pairwise(turns)
    ]
    assert "a fox" in new_parts[1]
    assert "thanks" in new_parts[2]
    assert "where" not in "".join(new_parts)


def test_a_client_that_returns_history_changed_still_continues_the_record(bench: Recording) -> None:
    """As OpenClaw does: thoughts stripped, ids and arguments rewritten, nothing for an empty string."""
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 5.0, "b": "x"}}\n</tool_call>'
    start = [user("where is the fox?")]
    first = bench.say(f"<think>\nhm\n</think>\n\n{call}", start, tools=TOOLS)
    assert first["reasoning_content"] == "hm"
    returned = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "renamed1", "type": "function", "function": {"name": "look", "arguments": '{"b":"x","at":5}'}}
        ],
    }
    result = {"role": "tool", "tool_call_id": "renamed1", "content": [{"type": "text", "text": "a fox"}]}
    second = bench.say("<think>so</think>There.", [*start, returned, result], tools=TOOLS)
    third = [*start, returned, result, {**second, "reasoning_content": None}, user("thanks")]
    bench.say("Bye.", third, tools=TOOLS)
    turns = bench.turns()
    assert [turn.continuation for turn in turns] == ["new", "realigned", "realigned"]
    for before, turn in itertools.pairwise(turns):
        whole = before.prompt_ids + before.response_ids
        assert turn.prompt_ids[: len(whole)] == whole


def test_history_that_truly_differs_forks(bench: Recording) -> None:
    start = [user("tell me")]
    answer = bench.say("a story", start, {"X-Session-Id": "one"})
    changed = {**answer, "content": "quite another story"}
    bench.say("ok", [*start, changed, user("go on")], {"X-Session-Id": "one"})
    first, second = bench.turns()
    assert second.continuation == "new"
    assert second.session == first.session
    # The session goes on all the same, so the first turn has its next state.
    assert [m["content"] for m in first.next_state or []] == ["go on"]


def test_what_a_stop_string_cut_off_is_no_history(bench: Recording) -> None:
    """The client never saw the stop string, so the model is not told that it said it."""
    answer = bench.say("one STOP", [user("count")], stop="STOP")
    assert answer["content"] == "one "
    bench.say("two", [user("count"), answer, user("go on")])
    first, second = bench.turns()
    assert bench.renderer.tokenizer.backend.decode(first.response_ids) == "one STOP"
    assert second.continuation == "forked"
    assert "STOP" not in bench.renderer.tokenizer.backend.decode(second.prompt_ids)
    assert first.next_state == [user("go on")]


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"X-Session-Id": "abc"}, {}),
        ({}, {"session_id": "abc"}),
        ({"x-session-affinity": "abc:3"}, {}),
        ({}, {"prompt_cache_key": "abc:12"}),
    ],
)
def test_sessions_by_name(bench: Recording, headers: dict, body: dict) -> None:
    bench.say("hello", [user("hi")], headers, **body)
    bench.say("hello", [user("quite unrelated")], headers, **body)
    assert [turn.session.id for turn in bench.turns()] == ["abc", "abc"]


def test_the_runtime_line_names_the_session(bench: Recording) -> None:
    first = user("[Sun 2026-11-15 00:47 UTC] hi\n\nRuntime: agent=main | sessionId=u-1 | host=x")
    answer = bench.say("hello", [OPENCLAW, first], tools=TOOLS)
    bench.say("bye", [OPENCLAW, first, answer, user("[Sun 2026-11-15 00:48 UTC] thanks")], tools=TOOLS)
    turns = bench.turns()
    assert [turn.session.id for turn in turns] == ["u-1", "u-1"]
    assert turns[0].next_state == [user("thanks")]


def test_users_who_said_the_same_so_far_stay_apart(bench: Recording) -> None:
    """No names, the same words and the same answers: two conversations all the same."""
    one = bench.say("hello", [user("hi")])
    other = bench.say("hello", [user("hi")])
    assert one["content"] == other["content"]
    for words in ("I am one", "I am the other"):
        bench.say("nice", [user("hi"), one, user(words)])
    turns = bench.turns()
    assert len({turn.session for turn in turns}) == 2
    assert len({turn.session for turn in turns[2:]}) == 2
    assert {str(turn.next_state[0]["content"]) for turn in turns[:2] if turn.next_state} == {
        "I am one",
        "I am the other",
    }


def test_the_transient_context_is_neither_history_nor_feedback(bench: Recording) -> None:
    context = user("<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> now: 12:00")
    first = user("[Sun 2026-11-15 00:47 UTC] hi")
    answer = bench.say("hello", [OPENCLAW, first, context], tools=TOOLS)
    second = user("[Sun 2026-11-15 00:48 UTC] no, shorter")
    bench.say("yo", [OPENCLAW, first, answer, second, context], tools=TOOLS)
    turns = bench.turns()
    assert turns[0].session == turns[1].session
    assert turns[0].next_state == [user("no, shorter")]
    # The context stood between the question and the answer and is gone, so the tokens cannot be kept.
    assert turns[1].continuation == "forked"


def test_side_turns_do_not_close_a_main_turn(bench: Recording) -> None:
    headers = {"X-Session-Id": "s"}
    answer = bench.say("hello", [user("hi")], headers)
    bench.say("a title", [user("hi"), answer, user("title, please")], {**headers, "X-Turn-Type": "side"})
    bench.say("a title", [user("hi"), answer, user("title, please")], headers, turn_type="side")
    main, *side = bench.turns()
    assert main.state is State.AWAITING
    assert [turn.state for turn in side] == [State.DROPPED] * 2
    assert side[0].reason == "the client said so"
    bench.say("bye", [user("hi"), answer, user("thanks")], headers)
    assert bench.turns()[0].next_state == [user("thanks")]


def test_a_retry_replaces_the_earlier_attempt_and_is_no_feedback(bench: Recording) -> None:
    headers = {"X-Session-Id": "s"}
    start = [user("hi")]
    answer = bench.say("hello", start, headers)
    asked = [*start, answer, user("a joke")]
    bench.say("knock knock", asked, headers)
    kept = bench.say("a better one", asked, headers)
    first, attempt, retry = bench.turns()
    assert first.next_state == [user("a joke")]
    assert (attempt.state, attempt.next_state) == (State.DROPPED, None)
    assert "superseded" in attempt.reason
    bench.say("bye", [*asked, kept, user("thanks")], headers)
    assert bench.turns()[2].next_state == [user("thanks")]
    assert retry.number == bench.turns()[2].number


@pytest.mark.parametrize("context", [None, "now: 12:00"])
def test_asking_the_first_question_again_is_no_feedback(bench: Recording, context: str | None) -> None:
    """Nothing was said before it that could tell the attempts apart, and a client's context changes in between."""
    headers = {"X-Session-Id": "s"}
    question = user("a tip for sleeping better")
    for answer, now in (("tea", context), ("a walk", context and "now: 12:01"), ("a book", context)):
        passing = [user(f"<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> {now}")] if now else []
        kept = bench.say(answer, [question, *passing], headers, tools=TOOLS)
    *attempts, last = bench.turns()
    assert [(turn.state, turn.next_state) for turn in attempts] == [(State.DROPPED, None)] * 2
    assert all("superseded" in turn.reason for turn in attempts)
    bench.say("bye", [question, kept, user("thanks")], headers, tools=TOOLS)
    assert last.state is State.AWAITING
    assert bench.turns()[2].next_state == [user("thanks")]


def test_a_retry_with_a_rewritten_history_is_the_next_state_of_one_answer_only(bench: Recording) -> None:
    """Two answers waited; the first attempt told one of them, and the second tells neither itself nor the other."""
    headers = {"X-Session-Id": "s"}
    bench.says = "answer {index}"
    bench.post({"messages": [user("hi")], "n": 2}, **headers)
    rewritten = [user("hi"), {"role": "assistant", "content": "said otherwise"}, user("go on")]
    bench.say("knock knock", rewritten, headers)
    bench.say("a better one", rewritten, headers)
    one, other, attempt, retry = bench.turns()
    assert [turn.next_state for turn in (one, other)] == [None, [user("go on")]]
    assert (attempt.state, attempt.next_state) == (State.DROPPED, None)
    assert (retry.state, retry.next_state) == (State.AWAITING, None)


def said(text: str) -> dict:
    return {"role": "assistant", "content": text}


def next_states(bench: Recording) -> list[list[str] | None]:
    """The words of each turn's next state."""
    return [
        None if turn.next_state is None else [message["content"] for message in turn.next_state]
        for turn in bench.turns()
    ]


NAMED = {"x-session-affinity": "s:0"}


@pytest.mark.parametrize("headers", [NAMED, {}], ids=["named", "unnamed"])
@pytest.mark.parametrize(
    ("question", "answer"),
    [("and of Spain?", "It is MADRID!"), ("and of SPAIN, please?", "Madrid.")],
    ids=["altered answer", "altered words"],
)
def test_feedback_on_an_answer_that_comes_back_altered_is_not_lost(
    bench: Recording, headers: dict, question: str, answer: str
) -> None:
    """An older answer is recognised, and it has its next state already: the last waiting turn is meant."""
    start = [user("capital of France?"), bench.say("Paris.", [user("capital of France?")], headers)]
    bench.say("Madrid.", [*start, user("and of Spain?")], headers)
    altered = [*start, user(question), said(answer), user("no, shorter")]
    kept = bench.say("MAD", altered, headers)
    assert next_states(bench) == [["and of Spain?"], ["no, shorter"], None]
    bench.say("bye", [*altered, kept, user("thanks")], headers)
    assert next_states(bench) == [["and of Spain?"], ["no, shorter"], ["thanks"], None]
    assert len({turn.session for turn in bench.turns()}) == 1


def test_everything_altered_is_the_same_conversation_only_where_the_client_names_it(bench: Recording) -> None:
    for headers, expected in ((NAMED, ["no, shorter"]), ({}, None)):
        start = [user(f"capital of France? {headers}")]
        start = [*start, bench.say("Paris.", start, headers)]
        bench.say("Madrid.", [*start, user("and of Spain?")], headers)
        bench.say("MAD", [*start, user("of SPAIN"), said("It is MADRID!"), user("no, shorter")], headers)
        assert next_states(bench)[-2] == expected


@pytest.mark.parametrize("headers", [NAMED, {}], ids=["named", "unnamed"])
def test_a_user_who_edits_an_older_message_says_nothing_about_the_newest_answer(
    bench: Recording, headers: dict
) -> None:
    start = [user("capital of France?"), bench.say("Paris.", [user("capital of France?")], headers)]
    bench.say("Madrid.", [*start, user("and of Spain?")], headers)
    edited = [*start, user("and of Italy?")]
    kept = bench.say("Rome.", edited, headers)
    assert next_states(bench) == [["and of Spain?"], None, None]
    bench.say("bye", [*edited, kept, user("thanks")], headers)
    assert next_states(bench) == [["and of Spain?"], None, ["thanks"], None]


def test_a_message_that_was_edited_at_its_end_is_feedback_only_where_answers_are_deleted(bench: Recording) -> None:
    """A client that names its session may have deleted the answer; other clients let their users edit."""
    for headers, expected in ((NAMED, ["shorter!"]), ({}, None)):
        start = [user(f"capital of France? {headers}")]
        start = [*start, bench.say("Paris.", start, headers)]
        bench.say("NO_REPLY", [*start, user("and of Spain?")], headers)
        bench.say("ok", [*start, user("and of Spain?\n\n[Sun 2026-11-15 00:48 UTC] shorter!")], headers)
        assert next_states(bench)[-2] == expected


@pytest.mark.parametrize("merged", [True, False])
def test_words_after_an_answer_that_the_client_deleted_are_its_next_state(bench: Recording, merged: bool) -> None:
    """As OpenClaw does with NO_REPLY and with an empty answer, also with the first one of a session."""
    question, reply = "[Sun 2026-11-15 00:47 UTC] hello?", "[Sun 2026-11-15 00:48 UTC] are you there?"
    bench.say("NO_REPLY", [OPENCLAW, user(question)], NAMED, tools=TOOLS)
    both = [user(f"{question}\n\n{reply}")] if merged else [user(question), user(reply)]
    kept = bench.say("yes", [OPENCLAW, *both], NAMED, tools=TOOLS)
    assert next_states(bench) == [["are you there?"], None]
    bench.say("bye", [OPENCLAW, *both, kept, user("thanks")], NAMED, tools=TOOLS)
    assert next_states(bench)[1] == ["thanks"]


def test_openclaw_s_own_retries_are_retries(bench: Recording) -> None:
    """As version 2026.9.6 sends them after an empty answer, and after an error of the server."""
    stamp = "[Mon 2026-11-16 06:54 UTC] "
    start = [OPENCLAW, user(f"{stamp}hi"), bench.say("hello", [OPENCLAW, user(f"{stamp}hi")], NAMED, tools=TOOLS)]
    asked = user(f"{stamp}a joke")
    bench.say("NO_REPLY", [*start, asked], NAMED, tools=TOOLS)
    again = user(
        f"{stamp}The previous attempt did not produce a user-visible answer. Continue from the current state and "
        "produce the visible answer now. Do not restart from scratch."
    )
    bench.say("", [*start, asked, again], NAMED, tools=TOOLS)
    queued = user(
        f"{stamp}[Queued user message from a previous active turn; preserved as context only. Continue with the active "
        "prompt below.]\na joke\n\nContinue the current task from the existing transcript, preserving completed work."
    )
    kept = bench.say("knock knock", [*start, queued], NAMED, tools=TOOLS)
    bench.say("bye", [*start, asked, kept, user(f"{stamp}thanks")], NAMED, tools=TOOLS)
    assert next_states(bench) == [["a joke"], None, None, ["thanks"], None]
    assert bench.states() == [State.READY, State.DROPPED, State.DROPPED, State.READY, State.AWAITING]
    assert [turn.reason[:10] for turn in bench.turns()[1:3]] == ["superseded"] * 2


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_conversation_that_begins_anew_is_no_feedback(bench: Recording, role: str) -> None:
    """A reset keeps the session's name; scripts use one `prompt_cache_key` for requests that have nothing in common."""
    prompt = {"role": role, "content": "You are an agent. " * 100}
    answer = bench.say("hello", [prompt, user("hi")], NAMED)
    bench.say("a poem", [prompt, user("write a poem")], NAMED)
    assert next_states(bench) == [None, None]
    bench.say("bye", [user("hi"), answer, prompt, user("thanks")], NAMED)
    assert next_states(bench) == [["thanks"], None, None]


def test_a_history_that_the_client_summarised_or_cut_still_has_its_next_state(bench: Recording) -> None:
    shortened = "The conversation history before this point was compacted into the following summary:"
    summary = user(f"{shortened}\n\n<summary>\nhi\n</summary>")
    answer = bench.say("hello", [OPENCLAW, user("hi")], NAMED, tools=TOOLS)
    answer = bench.say("hm", [OPENCLAW, summary, answer, user("a joke")], {"x-session-affinity": "s:1"}, tools=TOOLS)
    bench.say("hm!", [OPENCLAW, summary, user("another")], {"x-session-affinity": "s:2"}, tools=TOOLS)
    assert next_states(bench) == [["a joke"], ["another"], None]


def test_words_that_a_client_keeps_before_its_summary_are_no_feedback_again(bench: Recording) -> None:
    """Codex compacts to what the user said before, a summary, and what the user says now."""
    summary = user("Another language model started to solve this problem and produced a summary: a poem, shorter.")
    answer = bench.say("a poem", [user("write a poem")], NAMED, tools=TOOLS)
    bench.say("a haiku", [user("write a poem"), answer, user("Too long.")], NAMED, tools=TOOLS)
    kept = [user("write a poem"), user("Too long.")]
    bench.say("bye", [*kept, summary, user("Perfect, thank you!")], NAMED, tools=TOOLS)
    assert next_states(bench) == [["Too long."], ["Perfect, thank you!"], None]


@pytest.mark.parametrize("said_before", ["a joke", "a joke " * 400], ids=["short", "long"])
def test_what_claude_code_joins_with_a_persons_words_is_not_theirs(bench: Recording, said_before: str) -> None:
    """It asks for a summary in the message of the last words, and sends the summary in that of the next ones."""
    start = "This session is being continued from a previous conversation that ran out of context."
    caveat = "<local-command-caveat>The command below was run directly.</local-command-caveat>\n"
    task = "Answer with text only.\n\nYour task is to create a detailed summary of the conversation so far.\n"

    def ask(*texts: str) -> None:
        blocks = [{"type": "text", "text": text} for text in texts]
        body = {"model": MODEL, "max_tokens": 400, "messages": [{"role": "user", "content": blocks}]}
        tool = {"name": "look", "input_schema": {"type": "object"}}
        bench.anthropic.messages.create(**body, tools=[tool], extra_headers={"X-Claude-Code-Session-Id": "s"})

    ask("<system-reminder>\nx\n</system-reminder>\n", said_before)
    ask("<system-reminder>\nx\n</system-reminder>\n", f"{said_before}\n", task)
    ask(
        "<system-reminder>\ny\n</system-reminder>\n", f"{start}\nSummary: a joke\n", caveat, "Too long. Shorter please."
    )
    assert [(turn.kind, turn.kind_reason) for turn in bench.turns()] == [
        (TurnKind.MAIN, "chat"),
        (TurnKind.SIDE, "compaction"),
        (TurnKind.MAIN, "chat"),
    ]
    assert next_states(bench) == [["Too long. Shorter please."], None, None]


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ('"Too long. Say \\"blue\\" only."', 'Too long. Say "blue" only.'),
        ('"Too long.\n\nShorter, please."', "Too long.\n\nShorter, please."),
        ("“Too long.”", "Too long."),
        ('"Too" long or "short"', '"Too" long or "short"'),
        ("ok", "ok"),
        ('"', '"'),
    ],
)
def test_quotes_that_opencode_puts_around_words_are_not_the_persons(bench: Recording, sent: str, words: str) -> None:
    agent = {"x-session-id": "ses_1", "user-agent": "opencode/1.18.18 ai-sdk/provider-utils/4.0.23 runtime/bun/1.3.14"}
    for session in (agent, {"x-session-id": "s"}):
        answer = bench.say("hello", [user("hi")], session, tools=TOOLS)
        bench.say("blue", [user("hi"), answer, user(sent)], session, tools=TOOLS)
    assert next_states(bench) == [[words], None, [sent], None]


def test_one_name_for_unrelated_conversations_does_not_mix_their_feedback(bench: Recording) -> None:
    bench.say("hello", [user("hi")], {"x-session-affinity": "app"})
    other = [user("question of somebody else"), said("an example"), user("so, what is it?")]
    bench.say("this", other, {"x-session-affinity": "app"})
    assert next_states(bench) == [None, None]


@pytest.mark.parametrize(
    "words",
    [
        "/compact",
        "/status",
        "Follow the heartbeat monitor scratch context when provided. If nothing needs attention, reply NO_REPLY.",
    ],
)
@pytest.mark.parametrize("kept_as", [None, "[OpenClaw heartbeat poll]"], ids=["as it was", "a note"])
def test_commands_and_heartbeats_are_no_feedback(bench: Recording, words: str, kept_as: str | None) -> None:
    start = [OPENCLAW, user("hi"), bench.say("hello", [OPENCLAW, user("hi")], NAMED, tools=TOOLS)]
    asked = [*start, user(words)]
    kept = bench.say("done", asked, NAMED, tools=TOOLS)
    assert next_states(bench) == [None, None]
    assert bench.states() == [State.AWAITING, State.DROPPED]
    bench.say("bye", [*start, user(kept_as or words), kept, user("thanks")], NAMED, tools=TOOLS)
    assert next_states(bench)[:2] == [["thanks"], None]


def test_a_session_ends_by_header_by_field_and_by_request(bench: Recording) -> None:
    bench.say("bye", [user("hi")], {"X-Session-Id": "a", "X-Session-Done": "true"})
    bench.say("bye", [user("hi")], {"X-Session-Id": "b"}, session_done=True)
    bench.say("bye", [user("hi")], {"X-Session-Id": "b2"}, session_done="1")
    bench.say("bye", [user("hi")], {"X-Session-Id": "c"})
    assert bench.states() == [State.DROPPED] * 3 + [State.AWAITING]
    assert httpx.post(f"{bench.url}/v1/sessions/c/close").json() == {"id": "c", "status": "closed"}
    assert bench.states() == [State.DROPPED] * 4
    assert "without a next state" in bench.turns()[3].reason
    assert httpx.post(f"{bench.url}/v1/sessions/unknown/close").status_code == 404


def test_only_the_session_of_exactly_this_name_is_closed(bench: Recording) -> None:
    bench.say("bye", [user("hi")], {"X-Session-Id": "agent:main:2"})
    bench.say("bye", [user("hello")], session_id="agent:main:7")
    closed = httpx.post(f"{bench.url}/v1/sessions/agent:main:7/close").json()
    assert closed == {"id": "agent:main:7", "status": "closed"}
    unknown = httpx.post(f"{bench.url}/v1/sessions/agent:main:3/close")
    assert unknown.status_code == 404
    assert "'agent:main'" in unknown.json()["error"]["message"]
    assert bench.states() == [State.AWAITING, State.DROPPED]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [user("hi")]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/messages", {"messages": [user("hi")], "max_tokens": 5}),
        ("/v1/messages/count_tokens", {"messages": [user("hi")]}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
def test_a_very_long_name_is_refused_on_every_wire(bench: Recording, path: str, body: dict[str, Any]) -> None:
    for headers, field in (({"X-Session-Id": "s" * 257}, {}), ({}, {"session_id": "s" * 257})):
        response = httpx.post(bench.url + path, json={**body, **field}, headers=headers)
        assert response.status_code == 400
        assert "at most 256 characters" in response.json()["error"]["message"]
    assert not bench.turns()


def feedback(bench: Recording, **body: object) -> httpx.Response:
    return httpx.post(f"{bench.url}/v1/feedback", json=body)


def test_explicit_feedback(bench: Recording) -> None:
    bench.say("hello", [user("hi")])
    assert feedback(bench, id=bench.last_id, thumb="down", text="too long").status_code == 200
    assert feedback(bench, id=bench.last_id, score=0.5).status_code == 200
    (turn,) = bench.turns()
    assert turn.feedback == [Feedback(-1.0, "too long"), Feedback(0.5)]
    assert turn.state is State.READY


def test_feedback_that_cannot_be_used_is_refused(bench: Recording) -> None:
    bench.say("hello", [user("hi")], {"X-Turn-Type": "side"})
    assert feedback(bench, id=bench.last_id, thumb="up").status_code == 409
    assert feedback(bench, id="chatcmpl-unknown", thumb="up").status_code == 404
    assert feedback(bench, id=bench.last_id).status_code == 400
    assert feedback(bench, id=bench.last_id, score=1, thumb="up").status_code == 400
    assert feedback(bench, id=bench.last_id, score=2).status_code == 400
    bench.say("hello", [user("hi")])
    number = bench.turns()[-1].number
    with sqlite3.connect(bench.db.execute("PRAGMA database_list").fetchone()["file"]) as db:
        db.execute("UPDATE turns SET state = 'applied' WHERE number = ?", (number,))
    refused = feedback(bench, id=bench.last_id, thumb="up")
    assert refused.status_code == 409
    assert "already been trained" in refused.json()["error"]["message"]


def test_store_false_leaves_no_trace(bench: Recording) -> None:
    answer = bench.say("hello", [user("hi")], {"X-Session-Id": "s"})
    bench.say("secret", [user("hi"), answer, user("between us")], {"X-Session-Id": "s"}, store=False)
    (turn,) = bench.turns()
    assert turn.next_state is None
    rows = bench.db.execute("SELECT body FROM messages").fetchall()
    assert not any("between us" in row["body"] for row in rows)


def test_n_answers_are_n_turns_and_the_one_that_is_continued_gets_the_next_state(bench: Recording) -> None:
    bench.says = "answer {index}"
    choices = bench.post({"messages": [user("hi")], "n": 3}).json()["choices"]
    bench.say("ok", [user("hi"), choices[1]["message"], user("that one")])
    turns = bench.turns()
    assert [turn.choice for turn in turns] == [0, 1, 2, 0]
    assert [turn.next_state is not None for turn in turns] == [False, True, False, False]


def test_an_answer_that_nobody_waited_for_is_not_stored(bench: Recording) -> None:
    bench.says = "the quick brown fox " * 50
    bench.sampler.seconds_per_token = 0.005
    url = f"{bench.url}/v1/chat/completions"
    with httpx.stream("POST", url, json={"messages": [user("hi")], "stream": True}) as response:
        next(response.iter_lines())
    wait_for(lambda: bench.sampler.open == 0)
    assert bench.turns() == []


def test_a_locked_ledger_does_not_stop_the_server(bench: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.ledger.writer._connection.execute("PRAGMA busy_timeout = 50")
    monkeypatch.setattr(bench.ledger.writer, "retry_seconds", 0.1)
    blocker = sqlite3.connect(
        bench.db.execute("PRAGMA database_list").fetchone()["file"], isolation_level=None, check_same_thread=False
    )
    blocker.execute("BEGIN EXCLUSIVE")
    assert bench.say("hello", [user("hi")])["content"] == "hello"
    ready = httpx.get(f"{bench.url}/readyz").json()
    assert ready["ready"] is True
    assert ready["capture"].startswith("suspended: database is locked")
    assert "openclaw_capture_suspended 1.0" in httpx.get(f"{bench.url}/metrics").text
    blocker.execute("ROLLBACK")
    blocker.close()

    def captured_again() -> bool:
        bench.say("again", [user("hi")])
        return bool(bench.turns())

    wait_for(captured_again)
    assert httpx.get(f"{bench.url}/readyz").json()["capture"] == "on"


def test_metrics_count_turns_and_continuations(bench: Recording) -> None:
    def value(name: str) -> float:
        lines = httpx.get(f"{bench.url}/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    names = [f'openclaw_continuations_total{{kind="{kind}"}}' for kind in ("new", "realigned")]
    before = [value(name) for name in names]
    answer = bench.say("hello", [user("hi")])
    bench.say("bye", [user("hi"), answer, user("thanks")])
    assert [value(name) - old for name, old in zip(names, before, strict=True)] == [1, 1]


def test_owners_do_not_see_each_others_sessions(tiny_model: Path, tmp_path: Path) -> None:
    keys = [ApiKey("alice", "key-a"), ApiKey("bob", "key-b")]
    with running(Recording(tiny_model, tmp_path, keys=keys)) as bench:
        assert isinstance(bench, Recording)
        alice, bob = ({"Authorization": f"Bearer {key.secret}", "X-Session-Id": "same"} for key in keys)
        answer = bench.say("hello", [user("hi")], alice)
        bench.say("hello", [user("hi"), answer, user("I am bob")], bob)
        turns = bench.turns()
        assert [(turn.session.owner, turn.session.id) for turn in turns] == [("alice", "same"), ("bob", "same")]
        assert turns[0].next_state is None
        theirs = httpx.post(f"{bench.url}/v1/feedback", json={"id": turns[0].completion, "thumb": "up"}, headers=bob)
        assert theirs.status_code == 404
        bench.ledger.close()


def test_the_ledger_survives_a_restart_of_the_server(tiny_model: Path, tmp_path: Path) -> None:
    """The next process goes on from the recorded tokens."""
    with running(Recording(tiny_model, tmp_path)) as bench:
        assert isinstance(bench, Recording)
        answer = bench.say("hello", [user("hi")])
        bench.ledger.close()
    with running(Recording(tiny_model, tmp_path)) as bench:
        assert isinstance(bench, Recording)
        bench.say("bye", [user("hi"), json.loads(json.dumps(answer)), user("thanks")])
        first, second = bench.turns()
        assert second.session == first.session
        assert second.prompt_ids[: len(first.prompt_ids + first.response_ids)] == first.prompt_ids + first.response_ids
        assert first.next_state == [user("thanks")]
        bench.ledger.close()


def test_thoughts_that_the_client_left_out_do_not_make_a_request_too_long(bench: Recording) -> None:
    """With them the recorded tokens leave no room for an answer; the request as it came does."""
    answer = bench.say(f"<think>{'hm ' * 50}</think>Yes.", [user("hi")])
    (first,) = bench.turns()
    bench.sampler.limits = EngineLimits(len(first.prompt_ids + first.response_ids), max_sequences=1, max_choices=1)
    bench.say("ok", [user("hi"), {"role": "assistant", "content": answer["content"]}, user("more")])
    first, second = bench.turns()
    assert second.continuation == "forked"
    assert second.session == first.session


#: Mistral's habit: questions and answers must take turns, not counting calls and their results.
ALTERNATES = """\
{%- set seen = namespace(count=0) %}
{%- for message in messages if message.role != 'tool' and not message.tool_calls %}
{%- if (message.role == 'user') != (seen.count % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set seen.count = seen.count + 1 %}
{%- endfor %}"""


def test_a_record_that_the_template_does_not_accept_forks(tiny_model: Path, tmp_path: Path) -> None:
    """A call as it was sampled is an ordinary answer to the template, and two of those in a row are refused."""
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    template = folder / "chat_template.jinja"
    template.write_text(ALTERNATES + template.read_text())
    with running(Recording(folder, tmp_path / "ledger")) as bench:
        assert isinstance(bench, Recording)
        asked = [user("where is the fox?")]
        call = bench.say('<tool_call>\n{"name": "look", "arguments": {"at": 5.0}}\n</tool_call>', asked, tools=TOOLS)
        asked += [call, {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "a fox"}]
        answer = bench.say("The fox is here.", asked, tools=TOOLS)
        bench.say("Bye.", [*asked, answer, user("thanks")], tools=TOOLS)
        turns = bench.turns()
        bench.ledger.close()
    assert [turn.continuation for turn in turns] == ["new", "realigned", "forked"]
    assert len({turn.session for turn in turns}) == 1
    assert turns[1].next_state == [user("thanks")]
