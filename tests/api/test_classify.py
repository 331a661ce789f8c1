"""What a request is and whose session it belongs to, in the shapes that real clients send."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.api.capture.classify import classify, named_session, new_session_name
from openclaw_rl.api.errors import ApiError
from openclaw_rl.api.wire import ChatRequest
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import Ancestor, MainTurn, find_ancestor, last_waiting, load_turn, turn_numbers
from openclaw_rl.rendering.clients import CONTEXT_MARK, TRANSIENT, client_purpose, is_passing, user_words
from openclaw_rl.types import SessionKey, State, TurnKind
from support.harness import Bench, running
from support.records import Book, a_turn

Messages = list[dict[str, Any]]

SYSTEM = (
    "You are a personal assistant running inside OpenClaw.\n\n## Tooling\nAvailable: read, write, exec.\n"
    "<!-- openclaw:attempt:STABLE -->\n## Safety\nYou have no independent goals.\n\n## Heartbeats\n"
    "If you receive a heartbeat poll and nothing needs attention, reply HEARTBEAT_OK.\n"
)
RUNTIME = (
    "\n\nRuntime: agent=main | session=agent:main:main | sessionId=0b6f6f1e-6c35-4a2a-9d56-0a4b0c9d7e11 | "
    "host=box | os=Linux | model=local/tiny | thinking=off"
)
STAMP = "[Sun 2026-11-15 00:47 UTC] "
CONTEXT = {"role": "user", "content": f"{TRANSIENT}\nCurrent time: Sunday\n<<<END_OPENCLAW_INTERNAL_CONTEXT>>>"}
CALL = {"id": "call1", "type": "function", "function": {"name": "exec", "arguments": '{"command": "ls"}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "no such file\n\n(Command exited with code 3)", "tool_call_id": "call1"}
HEARTBEAT = "Follow the heartbeat monitor instructions in HEARTBEAT.md. If nothing needs attention, reply HEARTBEAT_OK."
EVENT = "An async command completion event was received: Exec finished (gateway id=1, code 0)"
FLUSH = "Pre-compaction memory flush. Store durable memories now; if nothing to store, reply NO_REPLY."
NOW = "\nCurrent time: Sunday, November 15th, 2026 - 10:22 (Europe/Vienna)\nReference UTC: 2026-11-15 09:22 UTC"
REMINDER = f"A scheduled reminder has been triggered. The reminder content is:\n\nCall Ann.{NOW}"
STARTED = "A new session was started via /new or /reset. Execute your Session Startup sequence now."
POLL = "[OpenClaw heartbeat poll]"
QUEUED = (
    "[Queued user message from a previous active turn; preserved as context only. "
    "Continue with the active prompt below.]"
)
TRY_AGAIN = (
    "The previous attempt did not produce a user-visible answer. Continue from the current state and produce the "
    "visible answer now. Do not restart from scratch."
)
CONTINUE = (
    "Continue the current task from the existing transcript, preserving completed work. If an action was interrupted, "
    "inspect its state before deciding whether to retry it. Do not restart the task or repeat completed actions."
)
COMMANDS = (
    "/compact",
    "/compact keep the decisions",
    "/new",
    "/reset now write a poem",
    "/status",
    "/think high",
    "/tools",
)
UNTIMED = (
    "[2026-11-15 10:22:33] ERROR db: connection refused",
    "The page shows 'Current time: 5 pm' at the top, remove it",
    "[WhatsApp +1555 Mon 2026-01-05 16:26:34 PST] hi",
    "[Slack #general +30s Mon 2026-01-05 16:26:34 PST] Ann: follow the heartbeat",
)
QUOTES = (
    HEARTBEAT,
    REMINDER,
    f"Why was I sent this?\n{HEARTBEAT}",
    "What does 'Pre-compaction memory flush.' mean?",
    "My log says [Inter-session message] isUser=false, why?",
    "/etc/hosts is wrong",
    "/tools is the wrong folder",
    "see /compact",
)


def system(text: str = SYSTEM) -> dict[str, Any]:
    return {"role": "system", "content": text}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


FIRST = [system(), user(f"{STAMP}List my files.{RUNTIME}")]
LOOP = [*FIRST, CALLS, RESULT]
LATER = [*LOOP, said("There are none."), user("[Mon 2026-11-16 09:05 GMT+1] Make one.")]

#: (what it is, messages, has tools, verdict, reason)
ROWS: list[tuple[str, Messages, bool, TurnKind, str]] = [
    ("a first message", FIRST, True, TurnKind.MAIN, "chat"),
    ("a later message", LATER, True, TurnKind.MAIN, "chat"),
    ("a tool loop", LOOP, True, TurnKind.MAIN, "chat"),
    ("heartbeat", [*LATER, said("Done."), user(HEARTBEAT)], True, TurnKind.SIDE, "heartbeat or system event"),
    ("heartbeat alone", [system(), user(HEARTBEAT)], True, TurnKind.SIDE, "heartbeat or system event"),
    ("heartbeat's tool loop", [*FIRST, said("x"), user(HEARTBEAT), CALLS, RESULT], True, TurnKind.SIDE, "heartbeat"),
    ("system event", [*FIRST, said("Begun."), user(EVENT)], True, TurnKind.SIDE, "heartbeat or system event"),
    ("memory flush", [*FIRST, said("x"), user(FLUSH)], True, TurnKind.SIDE, "memory flush"),
    ("stamped memory flush", [*FIRST, said("x"), user(STAMP + FLUSH)], True, TurnKind.SIDE, "memory flush"),
    ("flush's tool loop", [*FIRST, said("x"), user(FLUSH), CALLS, RESULT], True, TurnKind.SIDE, "memory flush"),
    (
        "compaction",
        [
            system("You are a context summarization assistant. Your task is to read a conversation."),
            user("<conversation>\n[User]: hello\n</conversation>\nCreate a structured summary."),
        ],
        False,
        TurnKind.SIDE,
        "compaction",
    ),
    (
        "title",
        [system("Generate a concise session title (3-6 words)."), user(f"{STAMP}List my files.")],
        False,
        TurnKind.SIDE,
        "session title",
    ),
    (
        "isolated cron",
        [system(), user("[cron:7d1f daily report] Write the daily report.")],
        True,
        TurnKind.SIDE,
        "scheduled run",
    ),
    (
        "stamped cron",
        [system(), user(f"{STAMP}[cron:7d1f daily report] Write the daily report.")],
        True,
        TurnKind.SIDE,
        "scheduled run",
    ),
    (
        "subagent",
        [system(), user(f"{STAMP}[Subagent Context] You are running as a subagent (depth 1/1).\n\nCount files.")],
        True,
        TurnKind.MAIN,
        "subagent",
    ),
    (
        "subagent's tool loop",
        [system(), user(f"{STAMP}[Subagent Context] Count files."), CALLS, RESULT],
        True,
        TurnKind.MAIN,
        "subagent",
    ),
    (
        "subagent completion",
        [
            *FIRST,
            said("I asked a helper."),
            user(
                f"{STAMP}[Inter-session message] sourceSession=agent:main:subagent:9c sourceTool=subagent_announce "
                "isUser=false\n\nThe task is finished: 3 files."
            ),
        ],
        True,
        TurnKind.SIDE,
        "message of another session",
    ),
    (
        "one-off inference",
        [system("Current model identity: local/tiny."), user("Say hello.")],
        False,
        TurnKind.SIDE,
        "one-off inference",
    ),
    ("scheduled reminder", [*FIRST, said("x"), user(REMINDER)], True, TurnKind.SIDE, "heartbeat or system event"),
    ("wake-up text of the owner's", [*FIRST, said("x"), user(f"Look around.{NOW}")], True, TurnKind.SIDE, "heartbeat"),
    ("heartbeat as the history shows it", [*FIRST, said("x"), user(POLL)], True, TurnKind.SIDE, "heartbeat"),
    ("heartbeat's tool loop, later", [*FIRST, said("x"), user(POLL), CALLS, RESULT], True, TurnKind.SIDE, "heartbeat"),
    ("start of a session", [system(), user(f"{STARTED}{NOW}")], True, TurnKind.SIDE, "session start"),
    *(
        (f"command {text}", [*FIRST, said("x"), user(STAMP + text)], True, TurnKind.SIDE, "command")
        for text in COMMANDS
    ),
    # OpenClaw gives no time to words that contain one.
    *((f"words: {text[:30]}", [*FIRST, said("x"), user(text)], True, TurnKind.MAIN, "chat") for text in UNTIMED),
    *((f"timed: {text[:30]}", [*FIRST, said("x"), user(STAMP + text)], True, TurnKind.MAIN, "chat") for text in QUOTES),
    ("words after a heartbeat", [*FIRST, said("x"), user(f"{POLL}\n\n{STAMP}hi")], True, TurnKind.MAIN, "chat"),
    ("asked again", [*FIRST, user(STAMP + TRY_AGAIN)], True, TurnKind.MAIN, "chat"),
    ("asked again after a tool", [*LOOP, user(STAMP + TRY_AGAIN)], True, TurnKind.MAIN, "chat"),
    ("heartbeat asked again", [system(), user(HEARTBEAT), user(TRY_AGAIN)], True, TurnKind.SIDE, "heartbeat"),
]

#: The same for other clients.
ORDINARY: list[tuple[str, Messages, bool, TurnKind, str]] = [
    ("an SDK's chat", [user("hello")], False, TurnKind.MAIN, "chat"),
    ("with a system prompt", [system("You are helpful."), user("hello")], False, TurnKind.MAIN, "chat"),
    ("developer role", [{"role": "developer", "content": "Be brief."}, user("hello")], True, TurnKind.MAIN, "chat"),
    ("a follow-up", [user("hello"), said("hi"), user("how are you?")], False, TurnKind.MAIN, "chat"),
    ("tool results last", [user("list"), CALLS, RESULT, RESULT], True, TurnKind.MAIN, "chat"),
    ("tool results, tools no longer offered", [user("list"), CALLS, RESULT], False, TurnKind.MAIN, "chat"),
    ("only a tool result", [CALLS, RESULT], True, TurnKind.MAIN, "chat"),
    ("no timestamp", [system("You are helpful."), user("Follow the heartbeat of the fox")], True, TurnKind.MAIN, "c"),
    ("assistant last", [user("hello"), said("I was about to")], False, TurnKind.SIDE, "no user or tool message"),
    ("system only", [system("You are helpful.")], False, TurnKind.SIDE, "no user or tool message"),
    (
        "a prompt that begins like a client's own, with tools",
        [system("Current model identity matters to me."), user("hello")],
        True,
        TurnKind.MAIN,
        "chat",
    ),
    (
        "a prompt that quotes a client's own",
        [system("You are helpful. Generate a concise session title when asked."), user("hello")],
        False,
        TurnKind.MAIN,
        "chat",
    ),
]


def in_parts(messages: Messages) -> Messages:
    """The same with every content as a list of one text part."""
    return [
        {**m, "content": [{"type": "text", "text": m["content"]}]} if m["content"] is not None else m for m in messages
    ]


@pytest.mark.parametrize("row", [*ROWS, *ORDINARY], ids=lambda row: row[0])
@pytest.mark.parametrize("parts", [False, True], ids=["strings", "parts"])
def test_main_or_side(row: tuple[str, Messages, bool, TurnKind, str], parts: bool) -> None:
    _what, messages, tools, kind, reason = row
    verdict, why = classify(in_parts(messages) if parts else messages, tools)
    assert verdict is kind
    assert why.startswith(reason)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_the_client_s_transient_context_changes_no_verdict(row: tuple) -> None:
    _what, messages, tools, kind, reason = row
    verdict, why = classify([*messages, CONTEXT], tools)
    assert verdict is kind
    assert why.startswith(reason)


def test_a_request_with_nothing_but_a_transient_context_is_no_turn() -> None:
    assert classify([system(), CONTEXT], True)[0] is TurnKind.SIDE


def test_only_what_begins_like_the_transient_context_is_it() -> None:
    assert is_passing(CONTEXT)
    assert all(map(is_passing, in_parts([CONTEXT])))
    assert not is_passing({"role": "tool", "content": CONTEXT["content"]})
    assert not is_passing(said(CONTEXT["content"]))
    assert not is_passing(user(f"What is {TRANSIENT}?"))
    assert not is_passing({"role": "user", "content": None})


# A person's words.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[Sun 2026-11-15 00:47 UTC] hello", "hello"),
        ("[Mon 2026-11-16 09:05 GMT+1] hello", "hello"),
        ("[Wed 2026-01-07 23:59 GMT+5:30] hello", "hello"),
        ("[Sun 2026-11-15 00:47 UTC] [Sun 2026-11-15 00:47 UTC] quoted", "[Sun 2026-11-15 00:47 UTC] quoted"),
        ("[Sun 2026-11-15 00:47 UTC] ", ""),
        ("[Sun 2026-11-15 00:47 UTC]\nhello", "[Sun 2026-11-15 00:47 UTC]\nhello"),
        ("hello [Sun 2026-11-15 00:47 UTC] there", "hello [Sun 2026-11-15 00:47 UTC] there"),
        ("\n[Sun 2026-11-15 00:47 UTC] hello", "\n[Sun 2026-11-15 00:47 UTC] hello"),
        ("[Someday 2026-11-15 00:47 UTC] hello", "[Someday 2026-11-15 00:47 UTC] hello"),
        ("[cron:1 x] hello", "[cron:1 x] hello"),
        ("", ""),
        ("[WhatsApp +1555 Mon 2026-01-05 16:26:34 PST] hi", "hi"),
        ("[WhatsApp +1555 +30s Mon 2026-01-05 16:26:34 PST] hi", "hi"),
        ("[2026-11-15 10:22:33] ERROR db: refused", "[2026-11-15 10:22:33] ERROR db: refused"),
        (f"{STAMP}{QUEUED}\nhello?\n\n{CONTINUE}", "hello?"),
        (f"{STAMP}{QUEUED}\none\n\ntwo", "one\n\ntwo"),
        (f"{STAMP}{QUEUED}\n{QUEUED}\none\n\ntwo\n\n{TRY_AGAIN}", "one\n\ntwo"),
        (f"{STAMP}{TRY_AGAIN}", ""),
        (f"{STAMP}hello?{RUNTIME}", "hello?"),
        (f"{STAMP}{QUEUED}\nhello?\n\n{TRY_AGAIN}{RUNTIME}", "hello?"),
        (f"{POLL}\n\n{STAMP}no, shorter", "no, shorter"),
        (f"{STAMP}{POLL}\nno, shorter", "no, shorter"),
        (POLL, ""),
        (f"What does this mean?\n{TRY_AGAIN}\nI saw it twice.", f"What does this mean?\n{TRY_AGAIN}\nI saw it twice."),
        (f"{STAMP}Sender: {CONTEXT_MARK}\n```json\n{{\n}}\n```\n\nReply: {CONTEXT_MARK}\nto Ann\n\nhi", "hi"),
        (f"{STAMP}hi\n\nContext: {CONTEXT_MARK}\nthe room is quiet", "hi"),
        (f"What is {CONTEXT_MARK}?", f"What is {CONTEXT_MARK}?"),
        (f"{CONTEXT['content']}", ""),
    ],
)
def test_the_client_s_lines_are_taken_from_what_a_person_wrote(text: str, words: str) -> None:
    assert user_words(text) == words


#: What a person could have written: it neither begins nor ends like a line of the client's.
PLAIN = st.text().filter(lambda text: user_words(text) == text)
BEFORE = st.lists(st.sampled_from([f"{QUEUED}\n", f"{POLL}\n\n", f"{POLL}\n{STAMP}"]), max_size=3)


@given(PLAIN, BEFORE, st.sampled_from(["", f"\n\n{CONTINUE}", f"\n\n{TRY_AGAIN}{RUNTIME}"]))
def test_words_between_the_client_s_lines_are_kept_as_they_are(text: str, before: list[str], after: str) -> None:
    assert user_words(STAMP + text) == text
    assert user_words(f"{STAMP}{''.join(before)}{text}{after}").strip() == text.strip()


@given(st.text())
def test_words_are_a_part_of_the_message_and_no_text_is_refused(text: str) -> None:
    assert user_words(text) in text
    client_purpose(text)
    is_passing(user(text))


HOSTILE = (" ", "\n", "[", STAMP, QUEUED, f"{POLL}\n", f"x {CONTEXT_MARK}\n", "Runtime: sessionId=", TRY_AGAIN, "( (")


@pytest.mark.parametrize("piece", HOSTILE)
def test_a_huge_message_takes_time_in_proportion_to_its_length(piece: str) -> None:
    """A pattern whose time grows with the square of the length would take hours."""
    for text in (piece * (2_000_000 // len(piece)), f"Current time: {piece * (2_000_000 // len(piece))}x"):
        user_words(text)
        client_purpose(text)


# The session's name.


def named(messages: Messages | None = None, headers: dict[str, str] | None = None, **body: Any) -> Any:
    given = messages or [user("hello")]
    return named_session(headers or {}, ChatRequest(messages=given, **body), given)


SIGNS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"headers": {"x-session-id": "from-header"}}, ("from-header", "header X-Session-Id")),
    ({"session_id": "from-field"}, ("from-field", "field session_id")),
    ({"headers": {"x-session-affinity": "affine:3"}}, ("affine", "header x-session-affinity")),
    ({"prompt_cache_key": "cached:3"}, ("cached", "field prompt_cache_key")),
    ({"messages": FIRST}, ("0b6f6f1e-6c35-4a2a-9d56-0a4b0c9d7e11", "OpenClaw's Runtime line")),
]


def together(signs: list[tuple[dict[str, Any], Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"headers": {}}
    for sign, _expected in signs:
        merged["headers"] |= sign.get("headers", {})
        merged |= {name: value for name, value in sign.items() if name != "headers"}
    return merged


@pytest.mark.parametrize("first", range(len(SIGNS)))
def test_the_plainest_sign_names_the_session(first: int) -> None:
    assert named(**SIGNS[first][0]) == SIGNS[first][1]
    assert named(**together(SIGNS[first:])) == SIGNS[first][1]


@pytest.mark.parametrize("first", range(len(SIGNS) - 1))
def test_an_empty_sign_is_none(first: int) -> None:
    signs = together(SIGNS[first:])
    sign, _expected = SIGNS[first]
    for name in sign.get("headers", {}):
        signs["headers"][name] = ""
    signs |= {name: "" for name in sign if name not in ("headers", "messages")}
    assert named(**signs) == SIGNS[first + 1][1]


def test_without_a_sign_there_is_no_name() -> None:
    assert named() is None
    one, other = new_session_name(), new_session_name()
    assert one != other


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("0b6f6f1e-6c35:0", "0b6f6f1e-6c35"),
        ("0b6f6f1e-6c35:12", "0b6f6f1e-6c35"),
        ("0b6f6f1e-6c35", "0b6f6f1e-6c35"),
        ("openclaw-cron-91ab", "openclaw-cron-91ab"),
        ("agent:main:subagent:9c:2", "agent:main:subagent:9c"),
        ("a:1:2", "a:1"),
        ("a:1x", "a:1x"),
    ],
)
def test_the_counter_that_rises_with_every_compaction_is_no_part_of_the_name(given: str, name: str) -> None:
    assert named(headers={"x-session-affinity": given})[0] == name
    assert named(headers={"x-session-id": given})[0] == name
    assert named(prompt_cache_key=given)[0] == name


def test_the_name_in_the_body_is_taken_as_it_is() -> None:
    assert named(session_id="case:7")[0] == "case:7"


#: Every way to name a session, with a name.
WAYS: dict[str, Callable[[str], dict[str, Any]]] = {
    "X-Session-Id": lambda name: {"headers": {"x-session-id": name}},
    "session_id": lambda name: {"session_id": name},
    "X-Claude-Code-Session-Id": lambda name: {"headers": {"x-claude-code-session-id": name}},
    "x-session-affinity": lambda name: {"headers": {"x-session-affinity": name}},
    "prompt_cache_key": lambda name: {"prompt_cache_key": name},
    "Runtime": lambda name: {"messages": [user(f"hello\n\nRuntime: agent=main | sessionId={name} | host=box")]},
}


@pytest.mark.parametrize("way", WAYS)
def test_a_very_long_name_is_refused(way: str) -> None:
    assert named(**WAYS[way]("x" * 256))[0] == "x" * 256
    with pytest.raises(ApiError, match=f"at most 256 characters; this one .*{way}.* has 257"):
        named(**WAYS[way]("x" * 257))


@pytest.mark.parametrize("parts", [False, True])
def test_the_runtime_line_stays_the_same_through_the_session(parts: bool) -> None:
    for messages in (FIRST, LOOP, LATER, [*LATER, CONTEXT]):
        given = in_parts(messages) if parts else messages
        assert named(given) == ("0b6f6f1e-6c35-4a2a-9d56-0a4b0c9d7e11", "OpenClaw's Runtime line")


@pytest.mark.parametrize(
    "messages",
    [
        [system(SYSTEM + RUNTIME), user("hello")],
        [user("hello"), said(f"hi{RUNTIME}"), user("how?")],
        [user("hello"), said("hi"), user(f"how?{RUNTIME}")],
        [user("I read 'Runtime: agent=main | sessionId=x' in a log")],
        [user("Runtime: agent=main | host=box")],
    ],
)
def test_a_runtime_line_elsewhere_names_nothing(messages: Messages) -> None:
    assert named(messages) is None


def test_a_runtime_line_that_the_user_pasted_does_not_hide_the_client_s_own() -> None:
    pasted = "Runtime: agent=main | sessionId=somebody-else | host=x"
    first = user(f"{STAMP}Why does my log say\n{pasted}\nat the end?{RUNTIME}")
    assert named([system(), first])[0] == "0b6f6f1e-6c35-4a2a-9d56-0a4b0c9d7e11"


def test_owners_with_the_same_session_name_stay_apart(tmp_path: Path) -> None:
    book = Book(tmp_path)
    name = named(headers={"x-session-affinity": "shared:1"})[0]
    turns = {owner: book.capture(a_turn(name, owner, end_key=b"same")) for owner in ("alice", "bob")}
    for owner, number in turns.items():
        key = SessionKey(owner, name)
        assert list(turn_numbers(book.db, key)) == [number]
        assert book.ledger.read(last_waiting, key) == number
        ancestor = book.ledger.read(find_ancestor, owner, [(2, b"same")], name, set())
        assert ancestor == Ancestor(number, key, 2, MainTurn(number, False))
    book.close()


def test_a_heartbeat_in_between_does_not_keep_the_user_s_words_from_the_turn_they_answer(
    tiny_model: Path, tmp_path: Path
) -> None:
    """The client keeps its heartbeats in the history; what the user says after one is still the next state."""
    ledger = Ledger(tmp_path)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]
    with running(Bench(tiny_model, ledger)) as bench:

        def ask(messages: Messages, says: str) -> Messages:
            bench.says = says
            answer = bench.post({"messages": messages, "tools": tools}).json()["choices"][0]["message"]
            return [*messages, said(answer["content"])]

        told = ask(FIRST, "There are none.")
        told = ask([*told, user(HEARTBEAT)], "HEARTBEAT_OK")
        told = ask([*told, user(f"{STAMP}Then make one.")], "Made.")
    ledger.close()
    with connect(tmp_path / FILE, readonly=True) as db:
        first, heartbeat, last = (load_turn(db, number) for number in turn_numbers(db))
    assert [turn.kind for turn in (first, heartbeat, last)] == [TurnKind.MAIN, TurnKind.SIDE, TurnKind.MAIN]
    assert len({first.session, heartbeat.session, last.session}) == 1
    assert first.state is State.READY
    assert first.next_state == [user("Then make one.")]
    assert heartbeat.next_state is None
    assert last.state is State.AWAITING
