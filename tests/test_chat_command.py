"""`openclaw-rl chat`: a client like any other, with what a terminal needs."""

import io
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from openclaw_rl.api.options import ApiKey
from openclaw_rl.cli import main
from openclaw_rl.cli.chat import NEW
from openclaw_rl.client import GIVE_KEY
from openclaw_rl.ledger.lock import RunDirLock
from support.harness import Bench, running
from support.records import Book


@pytest.fixture
def bench(tiny_model: Path, book: Book) -> Iterator[Bench]:
    with running(Bench(tiny_model, book.ledger)) as bench:
        lock = RunDirLock(book.folder)
        lock.tell(bench.url)
        yield bench
        lock.close()


def talk(book: Book, monkeypatch: pytest.MonkeyPatch, *said: str) -> int:
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in said)))
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
    assert talk(book, monkeypatch, "Hello.", NEW, "Good morning.") == 0
    first, second = (book.read(number) for number in (1, 2))
    assert first.next_state is None
    assert first.session != second.session


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
