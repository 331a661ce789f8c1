"""The commands about what is recorded say what is, in words and for programs, and never with a traceback."""

import asyncio
import contextlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.cli import main
from openclaw_rl.learn.checkpoints import Checkpoints
from openclaw_rl.ledger import changes, offline, queries, updates
from openclaw_rl.ledger.lock import RunDirLock
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.status import read_status
from openclaw_rl.terminal import WIDTH
from openclaw_rl.types import Feedback, State
from support.records import Book, a_side_turn, a_turn

Program = Callable[..., tuple[int, str, str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def book(folder: Path) -> Iterator[Book]:
    """The ledger, open in a server, as it were."""
    book = Book(folder)
    yield book
    book.close()


@pytest.fixture
def program(folder: Path, capsys: pytest.CaptureFixture[str]) -> Program:
    """Runs a command on the run directory: exit status, output, errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([*arguments, "--run-dir", str(folder)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def status(program: Program) -> dict[str, Any]:
    code, out, err = program("status", "--json")
    assert (code, err) == (0, "")
    told: dict[str, Any] = json.loads(out)
    return told


# status


def test_status_for_programs(book: Book, program: Program) -> None:
    for _ in range(2):
        book.capture(a_turn())
    book.capture(a_side_turn())
    book.put(State.JUDGED)
    batched = book.put(State.BATCHED)
    book.change(updates.apply, 4, 2, [batched])
    told = status(program)
    assert told["turns"] == {
        "captured": 0,
        "awaiting_next_state": 2,
        "ready": 0,
        "judged": 1,
        "batched": 0,
        "applied": 1,
        "dropped": 1,
    }
    assert (told["step"], told["policy_version"]) == (4, 2)
    assert told["dropped"] == {"session title": 1}
    assert (told["suspended"], told["quarantined"], told["server"]) == (None, [], None)
    assert isinstance(told["why_no_update"], str)


def test_status_for_people(book: Book, program: Program) -> None:
    book.capture(a_turn())
    book.capture(a_side_turn())
    code, out, err = program("status")
    assert (code, err) == (0, "")
    for expected in (
        "awaiting",
        "dropped 1 × session title",
        "not running",
        "step 0, policy version 0",
    ):
        assert expected in out
    assert "Why no update? 1 turn waits for what comes next" in out


@pytest.mark.parametrize("columns", [None, "80"])
def test_the_status_table_fits_into_80_columns(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch, columns: str | None
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns:
        monkeypatch.setenv("COLUMNS", columns)
    book.capture(a_turn())
    table = [line for line in program("status")[1].splitlines() if line[0] in "┏┃┡│└"]
    assert max(map(len, table)) <= 80
    assert "…" not in "".join(table)


def test_columns_count_where_it_is_no_terminal(book: Book, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    book.capture(a_turn())
    for columns in ("60", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        assert max(map(len, program("sessions", "s")[1].splitlines())) == int(columns)
    for unknown in ("0", "many"):
        monkeypatch.setenv("COLUMNS", unknown)
        assert max(map(len, program("sessions", "s")[1].splitlines())) == WIDTH


@pytest.mark.parametrize("how", [(), ("--json",)])
def test_status_where_no_server_has_been_says_so_and_makes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], how: tuple[str, ...]
) -> None:
    """A run directory is looked for where one is: an empty table there would look like a run of no turns."""
    monkeypatch.chdir(tmp_path)
    for run_dir in ("elsewhere", str(tmp_path)):
        assert main(["status", "--run-dir", run_dir, *how]) == 2
        said = capsys.readouterr()
        where = tmp_path / run_dir
        assert said.err == f"openclaw-rl: There is no ledger in {where}. Has a server run with this --run-dir?\n"
        assert said.out == ""
    assert not any(tmp_path.iterdir())


def test_status_of_a_server_that_has_recorded_nothing(folder: Path, program: Program) -> None:
    """While it starts, and when it has been stopped."""
    with contextlib.closing(RunDirLock(folder)):
        assert status(program)["why_no_update"].startswith("No turn has been recorded yet.")
    told = status(program)
    assert told["why_no_update"] == "No turn has been recorded yet. Start the server and talk to it."
    assert set(told["turns"]) == set(State)
    assert not any(told["turns"].values())


def test_status_of_a_file_is_refused(folder: Path, program: Program) -> None:
    folder.write_text("mine")
    code, out, err = program("status")
    assert (code, out) == (2, "")
    assert err == f"openclaw-rl: {folder} is a file. Give --run-dir the run directory of a server.\n"


def nothing(book: Book) -> None:
    pass


def waiting(book: Book) -> None:
    for _ in range(2):
        book.capture(a_turn())


def ready(book: Book) -> None:
    waiting(book)
    book.put(State.READY)


def judged(book: Book) -> None:
    """Whatever else waits, this can be trained on at once."""
    waiting(book)
    for _ in range(5):
        book.put(State.JUDGED)


def imported(book: Book) -> None:
    book.put(State.CAPTURED)


def dropped(book: Book) -> None:
    for _ in range(3):
        book.capture(a_side_turn())
    book.capture(a_turn("gone"))
    book.change(changes.close_session, ("me", "gone"))


@pytest.mark.parametrize(
    ("happened", "sentence"),
    [
        (nothing, "No turn has been recorded yet. Start the server and talk to it."),
        (waiting, "2 turns wait for what comes next: the next message of the same session, or POST /v1/feedback."),
        (ready, "1 turn waits to be judged, which the server does"),
        (
            judged,
            "The server is not running. 5 judged turns wait to be trained on, which it does once it is started",
        ),
        (imported, "1 imported turn waits to be scored by the policy."),
        (
            dropped,
            "No recorded turn can be trained on: 3 × session title, 1 × the session ended without a next state.",
        ),
    ],
)
def test_why_there_was_no_update(book: Book, program: Program, happened: Callable[[Book], None], sentence: str) -> None:
    happened(book)
    assert status(program)["why_no_update"].startswith(sentence)


@pytest.mark.parametrize("state", State)
def test_why_there_was_no_update_is_a_whole_sentence_wherever_turns_are(book: Book, state: State) -> None:
    turn = book.put(State.READY if state is State.DROPPED else state)
    if state is State.DROPPED:
        book.change(changes.move, turn, State.DROPPED, "because")
    sentence = read_status(book.db, None, {}).why_no_update
    assert sentence.endswith(".")
    assert not sentence.endswith((": .", ":.", " ."))
    # A turn on its way is not one that cannot be trained on.
    assert ("No recorded turn can be trained on" in sentence) == (state is State.DROPPED)


class Readyz(BaseHTTPRequestHandler):
    """A server that says how it is."""

    answer: tuple[int, bytes] = (200, b"{}")

    def do_GET(self) -> None:
        assert self.path == "/readyz"
        code, body = self.answer
        self.send_response(code)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def beside_a_server(folder: Path, book: Book, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for proxy in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(proxy, raising=False)
    server = HTTPServer(("127.0.0.1", 0), Readyz)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    lock = RunDirLock(folder)
    url = f"http://127.0.0.1:{server.server_port}"
    lock.tell(url)
    yield url
    lock.close()
    server.shutdown()
    server.server_close()
    thread.join()


def test_status_beside_a_server_says_where_it_is(beside_a_server: str, program: Program) -> None:
    Readyz.answer = (200, b'{"ready": true, "capture": "on"}')
    told = status(program)
    assert (told["server"], told["suspended"]) == (beside_a_server, None)
    assert told["why_no_update"] == f"No turn has been recorded yet. Talk to {beside_a_server}/v1."
    assert beside_a_server in program("status")[1]


@pytest.mark.parametrize("code", [200, 503])
def test_status_says_that_and_why_recording_is_suspended(
    beside_a_server: str, book: Book, program: Program, code: int
) -> None:
    """Also while the engine is not ready, which makes the answer a 503."""
    book.capture(a_turn())
    Readyz.answer = (code, b'{"ready": true, "capture": "suspended: database or disk is full"}')
    told = status(program)
    assert told["suspended"] == "database or disk is full"
    assert "database or disk is full" in told["why_no_update"]
    assert "database or disk is full" in program("status")[1]


@pytest.mark.parametrize("body", [b"", b"not json", b"[]", b"null", b"{}", b'{"capture": null}'])
def test_status_bears_with_a_server_that_says_nothing_of_use(
    beside_a_server: str, program: Program, body: bytes
) -> None:
    Readyz.answer = (200, body)
    assert status(program)["suspended"] is None


def test_status_bears_with_a_server_that_does_not_answer(folder: Path, book: Book, program: Program) -> None:
    lock = RunDirLock(folder)
    lock.tell("http://127.0.0.1:1")
    assert status(program)["suspended"] is None
    lock.close()


@pytest.mark.parametrize("happened", [nothing, waiting, ready, judged])
@pytest.mark.parametrize(
    ("capture", "judge", "sentence"),
    [
        ("off", "off", "Nothing is recorded (--no-capture). Start the server without that option"),
        ("on", "off", "Nothing is judged (--judge none). Start the server without that option"),
        ("on", "on", "Nothing is trained (--max-steps 0). Start the server without that option"),
    ],
)
def test_status_beside_a_server_that_does_not_learn_says_what_is_switched_off(
    beside_a_server: str,
    book: Book,
    program: Program,
    capture: str,
    judge: str,
    sentence: str,
    happened: Callable[[Book], None],
) -> None:
    happened(book)
    Readyz.answer = (200, json.dumps({"capture": capture, "judge": judge, "learner": "off"}).encode())
    assert status(program)["why_no_update"].startswith(sentence)


@pytest.mark.parametrize("count", [1, 2])
def test_status_says_how_far_the_next_step_is(beside_a_server: str, book: Book, program: Program, count: int) -> None:
    for _ in range(count):
        book.put(State.JUDGED)
    told = f"{count} of the 4 judged turns that a step needs (--batch-size)"
    Readyz.answer = (200, json.dumps({"capture": "on", "judge": "on", "learner": told}).encode())
    assert status(program)["why_no_update"] == f"The next step has {told}."


# checkpoints


def test_checkpoints_are_listed(folder: Path, program: Program) -> None:
    async def write(target: Path) -> None:
        (target / "weights").write_text("w")

    asyncio.run(Checkpoints(folder / "checkpoints", 3).save(2, 4, (), write))
    code, out, err = program("checkpoints")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == f"Checkpoints in {folder / 'checkpoints'}"
    assert "step-000002-v4" in out


def test_a_run_without_checkpoints_says_when_one_is_made(book: Book, program: Program) -> None:
    when = "one is made every --save-interval steps and when the server stops"
    expected = f"No checkpoint in {book.folder / 'checkpoints'} yet: {when}.\n"
    assert program("checkpoints") == (0, expected, "")


def test_listing_checkpoints_does_not_offer_to_delete_some(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["checkpoints", "--help"])
    assert "--keep-checkpoints" not in capsys.readouterr().out


# rollback


def test_going_back_names_the_step_and_status_the_policy_that_will_serve(
    folder: Path, book: Book, program: Program
) -> None:
    async def write(target: Path) -> None:
        (target / "weights").write_text("w")

    saved = Checkpoints(folder / "checkpoints", 3)
    for step in (2, 4):
        book.change(updates.apply, step, step, [book.put(State.BATCHED)])
        asyncio.run(saved.save(step, step, (), write))
    code, out, _err = program("rollback")
    assert (code, out) == (0, "The next start serves policy 5: that of step 2, and learning goes on from it.\n")
    told = status(program)
    assert (told["step"], told["policy_version"]) == (2, 5)
    code, _out, err = program("rollback")
    assert code == 2
    assert "--resume-from-ckpt none" in err


# sessions


def test_sessions_are_listed(book: Book, program: Program) -> None:
    book.capture(a_side_turn("one"))
    system = {"role": "system", "content": "be kind"}
    first = book.capture(a_turn("one", messages=[system, {"role": "user", "content": "what\nis one?"}]))
    book.change(changes.set_next_state, first, [{"role": "user", "content": "ok"}])
    book.capture(a_turn("two", owner="you", messages=[{"role": "user", "content": "and [b]two?"}]))
    book.change(changes.close_session, ("me", "one"))
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
@pytest.mark.parametrize("ids", [("s-0123456789ab", "s-ba9876543210"), (UUID, "s-0123456789ab")])
def test_in_a_terminal_of_80_columns_ids_are_whole(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch, ids: tuple[str, str], owners: tuple[str, str]
) -> None:
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
    book.change(changes.set_next_state, number, [{"role": "tool", "content": "in the wood", "tool_call_id": "a"}])
    book.change(changes.add_feedback, "me", turn.completion, 0, Feedback(-0.5, "slow"))
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


@pytest.mark.parametrize("command", [("sessions",), ("checkpoints",), ("forget", "--session", "x")])
def test_without_a_ledger_commands_say_so_and_make_none(
    folder: Path, program: Program, command: tuple[str, ...]
) -> None:
    code, _out, err = program(*command)
    assert code == 2
    assert f"There is no ledger in {folder}" in err
    assert not folder.exists()


def test_the_ledger_may_be_elsewhere(book: Book, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book.capture(a_turn("one"))
    assert main(["sessions", "--run-dir", str(tmp_path), "--rl-buffer-dir", str(book.folder)]) == 0
    assert "one" in capsys.readouterr().out


# forget


def test_forgetting_a_session(book: Book, program: Program) -> None:
    for name in ("one", "one", "two"):
        book.capture(a_turn(name))
    code, out, _err = program("forget", "--session", "one")
    assert code == 0
    assert "Forgot 1 session with 2 turns." in out
    assert "Training steps that had used them: none." in out
    assert [summary.key.id for summary in queries.sessions(book.db)] == ["two"]


def test_forgetting_a_user(book: Book, program: Program) -> None:
    for name, owner in (("one", "me"), ("two", "me"), ("one", "you")):
        book.capture(a_turn(name, owner))
    code, out, _err = program("forget", "--user", "me")
    assert code == 0
    assert "Forgot 2 sessions with 2 turns." in out
    assert [summary.key for summary in queries.sessions(book.db)] == [("you", "one")]


@pytest.mark.parametrize("whose", [("--session", "x"), ("--user", "x")])
def test_forgetting_what_is_not_there_is_said_and_changes_nothing(
    book: Book, program: Program, whose: tuple[str, str]
) -> None:
    book.capture(a_turn("one"))
    code, _out, err = program("forget", *whose)
    assert code == 2
    assert "nothing of that session or user" in err
    assert len(queries.sessions(book.db)) == 1


@pytest.mark.parametrize("whose", [(), ("--session", "one", "--user", "me")])
def test_forgetting_needs_either_a_session_or_a_user(book: Book, program: Program, whose: tuple[str, ...]) -> None:
    book.capture(a_turn("one"))
    code, _out, err = program("forget", *whose)
    assert code == 2
    assert "--session" in err
    assert "--user" in err
    assert len(queries.sessions(book.db)) == 1


def test_a_ledger_that_another_program_holds_is_said_in_a_sentence(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "LOCK_SECONDS", 0)
    book.capture(a_turn("one"))
    other = connect(book.folder / FILE)
    other.execute("BEGIN EXCLUSIVE")
    code, _out, err = program("forget", "--session", "one")
    assert code == 2
    assert "locked" in err
    # Looking is not held up.
    assert program("status")[0] == program("sessions")[0] == 0
    other.execute("ROLLBACK")
    other.close()
    assert program("forget", "--session", "one")[0] == 0


def test_a_large_ledger_is_not_written_anew_beside_a_server(
    book: Book, program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It could not record anything meanwhile."""
    monkeypatch.setattr(offline, "MAX_BYTES_REWRITTEN_BESIDE_SERVER", 0)
    for session in ("one", "two"):
        book.capture(a_turn(session))
    with contextlib.closing(RunDirLock(book.folder)):
        code, _out, err = program("forget", "--session", "one")
        assert code == 1
        assert "again when it is stopped" in err
    assert program("forget", "--session", "two")[0] == 0
    assert queries.sessions(book.db) == []


def test_what_could_not_be_wiped_yet_is_said(book: Book, program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody still reads an older state of the ledger, so its log cannot be emptied."""
    monkeypatch.setattr(offline, "LOCK_SECONDS", 0)
    book.capture(a_turn("one", messages=[{"role": "user", "content": "a-very-private-matter"}]))
    reader = connect(book.folder / FILE)
    reader.execute("BEGIN")
    reader.execute("SELECT * FROM turns").fetchall()
    code, _out, err = program("forget", "--session", "one")
    left = b"a-very-private-matter" in book.raw_bytes()
    reader.execute("ROLLBACK")
    reader.close()
    assert left == (code != 0)
    assert left == ("again" in err)


def test_a_file_that_is_no_ledger_is_said_in_a_sentence(folder: Path, program: Program) -> None:
    folder.mkdir()
    (folder / FILE).write_text("this is no database, whatever its name says " * 50)
    for command in (("status",), ("sessions",), ("forget", "--session", "x")):
        code, _out, err = program(*command)
        assert code == 2
        assert str(folder) in err
        assert err.count("\n") == 1
