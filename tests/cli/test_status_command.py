"""`openclaw-rl status` says what is, in words and for programs, beside a server or without one."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.cli import main
from openclaw_rl.ledger import sessions, training
from openclaw_rl.ledger.run_dir import RunDirLock
from openclaw_rl.ledger.status import read_status
from openclaw_rl.types import State
from support.commands import Program, status
from support.records import Book, a_side_turn, a_turn


def test_status_for_programs(book: Book, program: Program) -> None:
    for _ in range(2):
        book.capture(a_turn())
    book.capture(a_side_turn())
    book.put(State.JUDGED)
    batched = book.put(State.BATCHED)
    book.change(training.apply_step, 4, 2, [batched])
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
    assert isinstance(told["waiting_for"], str)


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
    assert "The next step: 1 turn waits for what comes next" in out
    assert "--preset personal has those" in out


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
        assert said.err == (
            f"openclaw-rl: There is no ledger in {where}: no server has recorded anything there. Start one with "
            "openclaw-rl serve, or give the --run-dir of another.\n"
        )
        assert said.out == ""
    assert not any(tmp_path.iterdir())


def test_status_of_a_server_that_has_recorded_nothing(folder: Path, program: Program) -> None:
    """While it starts, and when it has been stopped."""
    with contextlib.closing(RunDirLock(folder)):
        assert status(program)["waiting_for"].startswith("No turn has been recorded yet.")
    told = status(program)
    assert told["waiting_for"] == "No turn has been recorded yet. Start the server and talk to it."
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
    book.change(sessions.close_session, ("me", "gone"))


@pytest.mark.parametrize(
    ("happened", "sentence"),
    [
        (nothing, "No turn has been recorded yet. Start the server and talk to it."),
        (waiting, "2 turns wait for what comes next: the next message of the same session, or POST /v1/feedback."),
        (ready, "1 turn waits to be judged, which the server does"),
        (
            judged,
            "The server is not running. 5 judged turns wait for it: once it is started, it trains as soon as",
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
    assert status(program)["waiting_for"].startswith(sentence)


@pytest.mark.parametrize("state", State)
def test_why_there_was_no_update_is_a_whole_sentence_wherever_turns_are(book: Book, state: State) -> None:
    turn = book.put(State.READY if state is State.DROPPED else state)
    if state is State.DROPPED:
        book.change(sessions.move, turn, State.DROPPED, "because")
    sentence = read_status(book.db, None, {}).waiting_for
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
    assert told["waiting_for"] == f"No turn has been recorded yet. Talk to {beside_a_server}/v1."
    assert beside_a_server in program("status")[1]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(b'{"ready": true}', "the server shows its state only with its key"), (b"not json", "the server does not answer")],
)
def test_status_beside_a_silent_server_says_so(
    beside_a_server: str, program: Program, answer: bytes, reason: str
) -> None:
    Readyz.answer = (200, answer)
    assert status(program)["server_silent"] == reason
    assert f"This is from the ledger alone: {reason}." in program("status")[1]
    Readyz.answer = (200, b'{"ready": true, "capture": "on"}')
    assert status(program)["server_silent"] == ""


@pytest.mark.parametrize("code", [200, 503])
def test_status_says_that_and_why_recording_is_suspended(
    beside_a_server: str, book: Book, program: Program, code: int
) -> None:
    """Also while the engine is not ready, which makes the answer a 503."""
    book.capture(a_turn())
    Readyz.answer = (code, b'{"ready": true, "capture": "suspended: database or disk is full"}')
    told = status(program)
    assert told["suspended"] == "database or disk is full"
    assert "database or disk is full" in told["waiting_for"]
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
    assert status(program)["waiting_for"].startswith(sentence)


@pytest.mark.parametrize("count", [1, 2])
def test_status_says_how_far_the_next_step_is(beside_a_server: str, book: Book, program: Program, count: int) -> None:
    for _ in range(count):
        book.put(State.JUDGED)
    told = f"{count} of the 4 judged turns that a step needs (--batch-size)"
    Readyz.answer = (200, json.dumps({"capture": "on", "judge": "on", "learner": told}).encode())
    assert status(program)["waiting_for"] == f"{told} so far."
