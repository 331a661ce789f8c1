"""`openclaw-rl chat`: a client like any other, with what a terminal needs."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from openclaw_rl.api.options import ApiKey
from openclaw_rl.cli import main
from openclaw_rl.cli.chat import in_editor
from openclaw_rl.client import GIVE_KEY, Client
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.notes import of_owner
from openclaw_rl.ledger.options import NotesOptions
from openclaw_rl.ledger.run_dir import RunDirLock
from openclaw_rl.terminal import WordWriter
from support.harness import Bench, running
from support.records import Book


@contextlib.contextmanager
def served(model: Path, book: Book, **app: object) -> Iterator[Bench]:
    """A server that the command finds by its run directory."""
    with running(Bench(model, book.ledger, **app)) as bench:
        lock = RunDirLock(book.folder)
        lock.tell(bench.url)
        yield bench
        lock.close()


@pytest.fixture
def bench(tiny_model: Path, book: Book) -> Iterator[Bench]:
    with served(tiny_model, book) as bench:
        yield bench


@pytest.fixture
def noting(tiny_model: Path, book: Book) -> Iterator[Bench]:
    """A server that keeps notes."""
    with served(tiny_model, book, notes=NotesOptions()) as bench:
        yield bench


def talk(book: Book, monkeypatch: pytest.MonkeyPatch, *said: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in said)))
    return main(["chat", "--run-dir", str(book.folder)])


def converse(book: Book, monkeypatch: pytest.MonkeyPatch, said: Callable[[], Iterator[str]]) -> int:
    """Say lines between which other things happen."""
    monkeypatch.setattr("openclaw_rl.cli.chat.lines", said)
    return main(["chat", "--run-dir", str(book.folder)])


def test_answers_are_shown_and_what_is_said_next_is_feedback(
    bench: Bench, book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(book, monkeypatch, "Why is the sky blue?", "", "Shorter, please.") == 0
    shown = capsys.readouterr().out
    assert shown.count("hello world\n") == 2
    assert "policy 0" in shown
    first, second = (book.read(number) for number in (1, 2))
    assert first.next_state == [{"role": "user", "content": "Shorter, please."}]
    assert first.session == second.session


def test_an_answer_does_nothing_to_the_terminal(
    bench: Bench, book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.says = "hello \x1b[2J\x1b]0;title\x07world"
    assert talk(book, monkeypatch, "Hello.") == 0
    shown = capsys.readouterr().out
    assert "hello [2J]0;titleworld" in shown
    assert not {"\x1b", "\x07"} & set(shown)


def test_a_new_conversation_knows_nothing_of_the_one_before(
    bench: Bench, book: Book, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert talk(book, monkeypatch, "Hello.", "/new", "Good morning.") == 0
    first, second = (book.read(number) for number in (1, 2))
    assert first.next_state is None
    assert first.session != second.session


def test_a_note_is_told_once_when_it_is_written_and_notes_are_listed(
    noting: Bench, book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> Iterator[str]:
        yield "/notes"
        yield "Hello."
        assert noting.send("notes", {"text": "Answer in French."}).status_code == 200
        yield from ("How are you?", "And now?", "/notes")

    assert converse(book, monkeypatch, said) == 0
    shown = capsys.readouterr().out
    assert shown.count("There is no note yet") == 1
    assert " ".join(shown.split()).count("(/new); /undo takes it back: Answer in French.") == 1
    assert shown.count("Answer in French.") == 2


@pytest.mark.parametrize("is_judged", [True, False])
def test_a_new_conversation_waits_a_moment_until_what_was_said_is_read(
    bench: Bench, book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], is_judged: bool
) -> None:
    monkeypatch.setattr("openclaw_rl.cli.chat.JUDGE_SECONDS", 5.0 if is_judged else 0.2)
    left = iter([2, 1, 0])
    monkeypatch.setattr(
        Client, "ready", lambda _: {"judge": "on", "queue": {"to_judge": next(left, 0) if is_judged else 1}}
    )
    assert talk(book, monkeypatch, "/new") == 0
    assert ("still being read" in capsys.readouterr().out) != is_judged
    assert not is_judged or next(left, None) is None


def test_commands_are_never_messages(
    bench: Bench, book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        talk(book, monkeypatch, "/help", "/notes", "/nonsense", "/bad", "/undo", "Hello.", "//etc?", "/quit", "unheard")
        == 0
    )
    shown = capsys.readouterr().out
    for expected in ("/good", "There is no command /nonsense", "no complete answer to rate", "nothing to take back"):
        assert expected in shown
    assert [m["content"] for m in book.read(2).messages] == ["Hello.", "hello world", "/etc?"]
    assert len(bench.sampler.requests) == 2


@pytest.mark.parametrize(("command", "score"), [("/good", 1.0), ("/bad too long", -1.0)])
def test_answers_are_rated(
    bench: Bench,
    book: Book,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    score: float,
) -> None:
    assert talk(book, monkeypatch, "Hello.", command) == 0
    turn = book.read(1)
    (feedback,) = turn.feedback
    assert (feedback.score, feedback.text) == (score, command.partition(" ")[2])
    shown = capsys.readouterr().out
    assert turn.completion in shown
    assert "Recorded." in shown


def test_an_answer_is_written_as_it_was_wanted(
    bench: Bench, book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = ("/edit nothing to edit", "Hello.", "/edit Chef, hello.", "Again.", "/edit", "Chef,", "hello again.", ".")
    assert talk(book, monkeypatch, *said, "And now?") == 0
    assert [[one.correction for one in book.read(number).feedback] for number in (1, 2)] == [
        ["Chef, hello."],
        ["Chef,\nhello again."],
    ]
    assert book.read(3).messages[-1]["content"] == "And now?", "the lines of a correction are no messages"
    shown = capsys.readouterr().out
    assert "no complete answer to edit" in shown
    assert shown.count("Recorded.") == 2, "a server without notes shows nobody an example"


def test_an_answer_is_edited_in_an_editor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    editor = tmp_path / "editor.py"
    editor.write_text("import sys, pathlib\npathlib.Path(sys.argv[1]).write_text('Chef, it is Paris.')\n")
    monkeypatch.setenv("VISUAL", f"{sys.executable} {editor}")
    assert in_editor("It is Paris.") == "Chef, it is Paris."
    monkeypatch.setenv("VISUAL", str(tmp_path / "missing"))
    with pytest.raises(UserError, match="Set EDITOR"):
        in_editor("It is Paris.")


def test_a_note_that_was_just_written_is_taken_back(
    noting: Bench, book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said() -> Iterator[str]:
        yield from ("Hello.", "/edit Chef, hello.")
        assert noting.send("notes", {"text": "Answer in French."}).status_code == 200
        yield "How are you?"
        # Another note replaces it before it is taken back.
        assert noting.send("notes", {"text": "Answer in German."}).status_code == 200
        yield from ("/help", "/undo", "/undo", "Good morning.")

    assert converse(book, monkeypatch, said) == 0
    assert book.ledger.read(of_owner) == []
    assert [m["content"] for m in book.read(3).messages] == ["Hello.", "hello world", "Good morning."]
    assert "Kept as an example" in capsys.readouterr().out


def test_an_exchange_is_taken_back(bench: Bench, book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    assert talk(book, monkeypatch, "Hello.", "Wrong question.", "/undo", "Right question.") == 0
    assert [m["content"] for m in book.read(3).messages] == ["Hello.", "hello world", "Right question."]


def test_what_was_shown_of_a_stopped_answer_stays(
    bench: Bench, book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pieces = Client.chat

    def stopped(self: Client, messages: list[dict[str, str]]) -> Iterator[dict[str, str]]:
        if len(messages) > 1:
            yield from pieces(self, messages)
            return
        yield {"content": "hello "}
        raise KeyboardInterrupt

    monkeypatch.setattr(Client, "chat", stopped)
    assert talk(book, monkeypatch, "Hello.", "Too long.") == 0
    assert [m["content"] for m in book.read(1).messages] == ["Hello.", "hello ", "Too long."]
    assert "stays in the conversation" in capsys.readouterr().out


@given(st.text(alphabet="ab 狐\n", max_size=60), st.integers(1, 9), st.integers(6, 20))
def test_lines_break_between_words(text: str, size: int, width: int) -> None:
    out = io.StringIO()
    writer = WordWriter(Console(file=out, width=200), width)
    for at in range(0, len(text), size):
        writer.write(text[at : at + size])
    writer.end()
    shown = out.getvalue()
    assert shown.split() == text.split()
    for line in shown.splitlines():
        assert cell_len(line.rstrip()) <= width or " " not in line.strip()


def test_a_blank_behind_a_full_line_is_no_line_of_its_own() -> None:
    out = io.StringIO()
    writer = WordWriter(Console(file=out, width=200), 5)
    writer.write("about the fox")
    writer.end()
    # The terminal itself begins a line behind five columns.
    assert out.getvalue() == "about\nthe \nfox\n"


def test_what_the_server_refuses_is_said_and_the_conversation_goes_on(
    bench: Bench, book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.sampler.limits = replace(bench.sampler.limits, max_context_tokens=200)
    assert talk(book, monkeypatch, "hello " * 1000, "Hello.") == 0
    shown = capsys.readouterr().out
    assert "tokens" in shown
    assert shown.count("hello world\n") == 1
    assert book.read(1).next_state is None


def test_thoughts_are_shown_and_are_no_part_of_the_conversation(
    bench: Bench, book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.says = "<think>\nhm\n</think>\n\nhello"
    assert talk(book, monkeypatch, "Hello.", "And?") == 0
    assert capsys.readouterr().out.count("hm") == 2
    assert [message["content"] for message in book.read(2).messages] == ["Hello.", "hello", "And?"]


def test_a_server_that_wants_a_key_says_how_to_give_it(
    tiny_model: Path, book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SGLANG_API_KEY", raising=False)
    with running(Bench(tiny_model, keys=ApiKey.parse_all("S3CRET"))) as bench:
        lock = RunDirLock(book.folder)
        lock.tell(bench.url)
        assert talk(book, monkeypatch, "Hello.") == 2
        assert GIVE_KEY in capsys.readouterr().err
        monkeypatch.setenv("SGLANG_API_KEY", "S3CRET")
        assert talk(book, monkeypatch, "Hello.") == 0
        assert "hello world" in capsys.readouterr().out
        lock.close()


def test_without_a_server_it_says_how_to_start_one(
    book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(book, monkeypatch, "Hello.") == 2
    assert "start one in another terminal" in capsys.readouterr().err


def test_a_server_that_has_gone_is_a_sentence(
    book: Book, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = RunDirLock(book.folder)
    lock.tell("http://127.0.0.1:1")
    assert talk(book, monkeypatch, "Hello.") == 2
    assert "does not answer: " in capsys.readouterr().err
    lock.close()
