"""`openclaw-rl sessions` fits the terminal and shows a session in full."""

import re
from pathlib import Path

import pytest

from openclaw_rl.cli import main
from openclaw_rl.ledger import sessions, turns, verdicts
from openclaw_rl.terminal import WIDTH
from openclaw_rl.types import Feedback, Hint, SampleKind, Source, State, Verdict
from support.commands import Program
from support.records import Book, a_side_turn, a_turn


def test_sessions_are_listed(book: Book, program: Program) -> None:
    book.capture(a_side_turn("one"))
    system = {"role": "system", "content": "be kind"}
    first = book.capture(a_turn("one", messages=[system, {"role": "user", "content": "what\nis one?"}]))
    book.change(turns.set_next_state, first, [{"role": "user", "content": "ok"}])
    book.capture(a_turn("two", owner="you", messages=[{"role": "user", "content": "and [b]two?"}]))
    book.change(sessions.close_session, ("me", "one"))
    code, out, _err = program("sessions")
    told = {row[0]: (row[1], row[2], *row[4:]) for row in rows(out)}
    assert code == 0
    assert told == {
        "one": ("me", "header X-Session-Id", "2", "1", "1", "", "what is one?"),
        "two": ("you", "header X-Session-Id", "1", "1", "0", "yes", "and [b]two?"),
    }


def rows(out: str) -> list[list[str]]:
    """The cells of a table."""
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]


UUID = "0b5c1f2e-1111-2222-3333-444455556666"


@pytest.mark.parametrize("owners", [("me", "me"), ("me", "somebody-else")])
def test_in_a_terminal_of_80_columns_ids_are_whole(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch, owners: tuple[str, str]
) -> None:
    ids = ("s-0123456789ab", "s-ba9876543210")
    for id, owner in zip(ids, owners, strict=True):
        book.capture(a_turn(id, owner, messages=[{"role": "user", "content": "what is it\nabout? " * 20}]))
    monkeypatch.setenv("COLUMNS", "80")
    out = program("sessions")[1]
    assert max(map(len, out.splitlines())) <= 80
    told = {row[0]: row[1:] for row in rows(out)}
    assert set(told) == set(ids)
    for row in told.values():
        assert any(re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", cell) for cell in row)
        assert re.match(r"what is .*…", row[-1])


@pytest.mark.parametrize("owners", [("me", "me"), ("me", "somebody-else")])
def test_the_words_of_a_session_are_below_a_long_id_where_they_have_no_room_beside_it(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch, owners: tuple[str, str]
) -> None:
    for id, owner in zip((UUID, "s-0123456789ab"), owners, strict=True):
        book.capture(a_turn(id, owner, messages=[{"role": "user", "content": "what is it\nabout? " * 20}]))
    monkeypatch.setenv("COLUMNS", "80")
    out = program("sessions")[1]
    assert max(map(len, out.splitlines())) <= 80
    told = rows(out)
    assert [row[0] for row in told[::2]] == ["s-0123456789ab", UUID]
    assert {row[0] for row in told[1::2]} == {"what is it about? what is it about?…"}
    assert ("somebody-else" in out) == ("somebody-else" in owners)


def test_a_session_is_about_a_persons_words_and_not_the_clients(book: Book, program: Program) -> None:
    context = {"role": "user", "content": "<environment_context>\n  <cwd>/home/me</cwd>\n</environment_context>"}
    book.capture(a_turn("codex", messages=[context, {"role": "user", "content": "Fix the bug."}]))
    book.capture(a_turn("alone", messages=[context]))
    told = {row[0]: row[-1] for row in rows(program("sessions")[1])}
    assert told["codex"] == "Fix the bug."
    assert told["alone"].startswith("<environment_context>")


def test_an_id_that_is_wider_than_the_terminal_is_whole(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    book.capture(a_turn("s" * 100))
    monkeypatch.setenv("COLUMNS", "80")
    assert rows(program("sessions")[1])[0][0] == "s" * 100


def test_a_run_without_sessions_says_so(book: Book, program: Program) -> None:
    assert program("sessions") == (0, "No session has been recorded yet.\n", "")


def test_the_beginning_of_an_id_is_enough(book: Book, program: Program) -> None:
    for name in ("s-aab", "s-abb", "s-ab", "s-%"):
        book.capture(a_turn(name))
    for given, found in (("s-aa", "s-aab"), ("s-abb", "s-abb"), ("s-ab", "s-ab"), ("s-%", "s-%")):
        code, out, _err = program("sessions", given)
        assert (code, out.split(" ")[0]) == (0, found)
    code, out, err = program("sessions", "s-a")
    assert (code, out) == (2, "")
    assert err == "openclaw-rl: 3 sessions begin with s-a: s-aab, s-ab, s-abb. Give more of the id.\n"


def test_a_session_is_shown_readably(book: Book, program: Program) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": '{"at": "the fox"}'}}
    turn = a_turn(
        "one",
        messages=[{"role": "system", "content": "be kind"}, {"role": "user", "content": "[b]Where[/b]? 狐 :fox:"}],
        message={"role": "assistant", "content": "I look.", "tool_calls": [call]},
    )
    number = book.capture(turn)
    book.change(turns.set_next_state, number, [{"role": "tool", "content": "in the wood", "tool_call_id": "a"}])
    book.change(turns.add_feedback, "me", turn.completion, 0, Feedback(-0.5, "slow"))
    book.capture(a_turn("another", messages=[{"role": "user", "content": "not shown"}]))
    code, out, _err = program("sessions", "one")
    assert code == 0
    for expected in (
        "user: [b]Where[/b]? 狐 :fox:",
        "assistant: I look.",
        'calls look {"at": "the fox"}',
        "next, tool: in the wood",
        "feedback: -0.5 slow",
        "3 prompt tokens, 2 response tokens, stop",
        "main · ready",
    ):
        assert expected in out
    assert "not shown" not in out


@pytest.mark.parametrize("name", ["a[/x]b", "[red]c", "agent:fox:[/]", "[bold", "\\[x]"])
def test_names_that_clients_chose_are_shown_as_they_are(book: Book, program: Program, name: str) -> None:
    book.capture(a_turn("other"))
    book.capture(a_turn(name, owner=name))
    code, out, _err = program("sessions")
    assert code == 0
    assert out.count(name) == 2
    code, out, _err = program("sessions", name)
    assert code == 0
    assert f"{name} of {name}, recognised by" in out


#: Clears the screen, changes the title, writes to the clipboard, moves the cursor, reverses the text.
ATTACKS = ("\x1b[2J\x1b[1;31m", "\x1b]0;title\x07", "\x1b]52;c;aGk=\x1b\\", "\r\x08\x7f", "\x9b31m", "\u202etxet")


@pytest.mark.parametrize("attack", ATTACKS)
def test_no_text_of_a_client_a_model_or_a_judge_reaches_the_terminal_raw(
    book: Book, program: Program, attack: str
) -> None:
    name, text = f"s-{attack}", f"before{attack}after"
    call = {"id": "a", "type": "function", "function": {"name": text, "arguments": text}}
    answer = {"role": "assistant", "content": text, "tool_calls": [call]}
    turn = a_turn(name, f"me{attack}", messages=[{"role": "user", "content": text}], message=answer)
    number = book.capture(turn)
    book.change(turns.set_next_state, number, [{"role": "user", "content": text}])
    book.change(turns.add_feedback, f"me{attack}", turn.completion, 0, Feedback(1.0, text))
    book.change(verdicts.store, number, Verdict(1.0, Source.FEEDBACK, (Hint(text),), reason=text), SampleKind.RL)
    book.capture(a_turn(f"{name}2", "you"))
    book.change(sessions.move, book.capture(a_turn("dropped")), State.DROPPED, f"[/b]{text}")
    for arguments in (("sessions",), ("sessions", name), ("sessions", "s-"), ("sessions", attack), ("status",)):
        _code, out, err = program(*arguments)
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err)
    assert "before" in program("sessions", name)[1]
    assert "[/b]before" in program("status")[1]


def test_the_client_s_lines_are_not_shown(book: Book, program: Program) -> None:
    stamp, context = "[Sun 2026-11-15 00:47 UTC] ", "<<<BEGIN_OPENCLAW_INTERNAL_CONTEXT>>> secret"
    first = f"{stamp}Where is the fox?\n\nRuntime: agent=main | sessionId=u-1 | host=box"
    asked = [{"role": "user", "content": first}, {"role": "user", "content": context}]
    number = book.capture(a_turn("one", messages=asked))
    book.change(turns.set_next_state, number, [{"role": "user", "content": "no, shorter"}])
    assert rows(program("sessions")[1])[0][-1] == "Where is the fox?"
    out = program("sessions", "one")[1]
    assert "user: Where is the fox?" in out
    assert not any(word in out for word in ("Runtime", "2026-11-15 00:47", "secret"))


def test_equal_names_of_two_owners_are_both_shown(book: Book, program: Program) -> None:
    for owner in ("me", "you"):
        book.capture(a_turn("one", owner, messages=[{"role": "user", "content": f"I am {owner}"}]))
    out = program("sessions", "one")[1]
    assert "I am me" in out
    assert "I am you" in out


def test_a_session_that_is_not_there_is_said_in_a_sentence(book: Book, program: Program) -> None:
    code, out, err = program("sessions", "nothing")
    assert (code, out) == (2, "")
    assert err == "openclaw-rl: There is no session nothing. 'openclaw-rl sessions' lists them.\n"


def test_the_ledger_may_be_elsewhere(book: Book, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book.capture(a_turn("one"))
    assert main(["sessions", "--run-dir", str(tmp_path), "--rl-buffer-dir", str(book.folder)]) == 0
    assert "one" in capsys.readouterr().out


def test_columns_count_where_it_is_no_terminal(book: Book, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    book.capture(a_turn())
    for columns in ("60", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert max(map(len, program("sessions", "s")[1].splitlines())) == int(columns)
    for unknown in ("0", "many"):
        monkeypatch.setenv("COLUMNS", unknown)
        assert max(map(len, program("sessions", "s")[1].splitlines())) == WIDTH


def test_a_damaged_turn_is_named_where_its_words_were(book: Book, program: Program, tmp_path: Path) -> None:
    bad, good = book.capture(a_turn("bad")), book.capture(a_turn("good"))
    book.damage(bad)
    code, out, _err = program("sessions")
    assert code == 0
    assert f"(turn {bad} is damaged" in out
    assert f"turn {bad} is damaged: " in program("sessions", "bad")[1]
    assert f"turn {good} · main" in program("sessions", "good")[1]
    for how in ("trajectories", "jsonl"):
        file = tmp_path / "out.jsonl"
        code, out, err = program("export", "--format", how, str(file))
        assert (code, len(file.read_text().splitlines())) == (1, 1)
        assert err.startswith(f"Left out: turn {bad} is damaged: ")
    assert program("status")[0] == 0
