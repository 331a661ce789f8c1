"""What a run that was recorded as text teaches another model."""

import contextlib
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.cli import main
from openclaw_rl.errors import UserError
from openclaw_rl.ledger import notes, verdicts
from openclaw_rl.ledger.lessons import import_run
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.ledger.turns import add_feedback
from openclaw_rl.methods.base import NoSignal
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import Feedback, Source, State, Verdict
from support.methods import a_method
from support.records import Book, a_turn, stored_turns

TEXT: dict[str, Any] = {"prompt_ids": [], "response_ids": [], "logprobs": []}


def ask(text: str, answer: str, book: Book, score: float | None = None, **given: Any) -> str:
    """Record a turn as text, with a verdict; its completion's id."""
    messages = [{"role": "user", "content": text}]
    turn = a_turn(messages=messages, message={"role": "assistant", "content": answer}, **TEXT, **given)
    number = book.capture(turn)
    if score is not None:
        book.move(number, State.READY)
        verdict = Verdict(score, Source.EXPLICIT)
        book.change(verdicts.record, number, verdict, None, "recorded as text", 0)
    return turn.completion


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A run of an API's model: an accepted answer, a rejected one, one that was corrected, a note and an example."""
    book = Book(tmp_path / "source")
    ask("Name a bird.", "A stork.", book, 1.0)
    ask("Name a fish.", "A whale.", book, -1.0)
    ask("Name a tree.", "An oak, of course, because …", book, 1.0, finish_reason="length")
    corrected = ask("Name a town.", "Paris, the capital of France.", book)
    book.change(add_feedback, "me", corrected, 0, Feedback(-1.0, correction="Paris."))
    book.change(notes.add, "me", "Be brief.")
    book.close()
    return book.folder


def test_accepted_answers_and_corrections_are_taken_over_once(source: Path, tmp_path: Path, tiny_model: Path) -> None:
    renderer = ChatRenderer(tiny_model)
    with open_ledger(tmp_path / "target", create_missing=True) as db:
        assert import_run(db, source, renderer).turns == 2
        assert import_run(db, source, renderer).known == 2
        texts = {note.text for note in notes.for_new_conversation(db, "me")}
        assert texts == {"Be brief.", "Paris."}
    lessons = stored_turns(tmp_path / "target")
    assert [turn.message["content"] for turn in lessons] == ["A stork.", "Paris."]
    assert {(turn.state, turn.feedback[0].score) for turn in lessons} == {(State.CAPTURED, 1.0)}
    first = lessons[0]
    assert "Name a bird." in renderer.tokenizer.backend.decode(first.prompt_ids)
    assert renderer.tokenizer.backend.decode(first.response_ids) == "A stork."
    assert not first.logprobs, "the API's model is not asked how likely it was"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, tiny_model: Path) -> None:
    with (
        open_ledger(tmp_path / "target", create_missing=True) as db,
        pytest.raises(UserError, match="is no run directory"),
    ):
        import_run(db, tmp_path, ChatRenderer(tiny_model))


def test_turns_that_are_text_are_never_trained_on(source: Path) -> None:
    accepted = stored_turns(source)[0]
    assert accepted.is_text
    with pytest.raises(NoSignal, match="recorded as text"):
        a_method("rl").lesson(accepted)


@pytest.mark.more
def test_a_local_model_is_taught_from_such_a_run(
    source: Path, tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "run"
    arguments = ["train", str(source), "--run-dir", str(target), "--model-name", str(tiny_model), "--method", "rl"]
    fast = ["--judge", "feedback", "--batch-size", "2", "--lora-rank", "4", "--max-kl", "100"]
    with contextlib.suppress(SystemExit):
        assert main([*arguments, *fast, "--kv-cache-gib", "0.1", "--max-context-tokens", "256"]) == 0
    assert {turn.state for turn in stored_turns(target)} == {State.APPLIED}
    assert "checkpoint" in capsys.readouterr().out
