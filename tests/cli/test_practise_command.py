"""`openclaw-rl practise` asks for practice, waits for its end, lists and stops it."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openclaw_rl.cli import practise
from openclaw_rl.ledger import notes, practices, training, verdicts
from openclaw_rl.ledger.run_dir import RunDirLock
from openclaw_rl.types import PracticeState
from support.commands import Program, status
from support.practice import begin
from support.records import Book, a_turn

#: Answers nothing, and says so at once.
NOBODY = "http://127.0.0.1:1"


@pytest.fixture
def running(folder: Path) -> Iterator[RunDirLock]:
    """As if a server used the run directory."""
    with contextlib.closing(RunDirLock(folder)) as lock:
        lock.tell(NOBODY)
        yield lock


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What happens each time that the command waits a little; at the end, nothing may be left to wait for."""

    def plan(*happens: Callable[[], object]) -> None:
        left = iter(happens)
        monkeypatch.setattr(practise.time, "sleep", lambda _seconds: next(left)())

    return plan


def a_note(book: Book, text: str = "Call me Chef.") -> int:
    return int(book.change(notes.add, "me", text).number)


def end(book: Book, number: int, state: PracticeState, reason: str) -> Callable[[], object]:
    return lambda: book.change(practices.set_state, number, state, reason)


def test_without_a_server_it_is_kept_for_later(book: Book, program: Program) -> None:
    assert program("practise", "--list") == (0, "Nothing was practised yet.\n", "")
    one, two = a_note(book), a_note(book, "Use metric units.")
    code, out, _err = program("practise")
    assert (code, out) == (
        0,
        f"No server runs. Once one does (openclaw-rl serve), it practises note {one}, note {two}.\n",
    )
    assert "waits to be practised" in program("practise", "--list")[1]
    assert f"Stopped: note {two}." in program("practise", str(two), "--stop")[1]
    assert f"Stopped: note {one}." in program("practise", "--stop")[1]
    assert "Nothing is being practised." in program("practise", "--stop")[1]
    assert program("practise", "--list")[1].count("practice stopped: by its owner") == 2


def test_it_waits_for_one_note_after_the_other(
    book: Book, program: Program, running: RunDirLock, meanwhile: Callable[..., None]
) -> None:
    one, two = a_note(book), a_note(book, "Use metric units.")
    meanwhile(
        lambda: book.change(begin, one),
        end(book, 1, PracticeState.LEARNED, "without the note, 15 of 16 answers to other questions keep to it"),
        end(book, 2, PracticeState.STOPPED, "this model keeps to it in 2 of 64 answers; a larger model may"),
    )
    code, out, _err = program("practise")
    said = " ".join(out.split())
    assert code == 1, "one of them was not practised"
    assert "learned for good in 0 steps: without the note, 15 of 16 answers to other questions keep to it" in said
    assert "practice stopped: this model keeps to it in 2 of 64 answers; a larger model may" in said
    # The second is listed with its reason; the first is retired.
    listed = " ".join(program("notes")[1].split())
    assert "learned for good on" in listed
    assert "2 of 64" in listed
    book.change(lambda db: notes.edit(db, two, text="Use SI units."))
    assert "2 of 64" not in program("notes")[1], "that was about another text"
    assert [note.number for note in notes.of_owner(book.db) if note.state == "active"] == [two]


def test_a_note_that_is_forgotten_meanwhile_is_said(
    book: Book, program: Program, running: RunDirLock, meanwhile: Callable[..., None]
) -> None:
    number = a_note(book)
    meanwhile(lambda: book.change(notes.forget, "me"))
    assert program("practise") == (1, f"Note {number} was deleted, so its practice has ended.\n", "")


def test_a_server_that_stops_meanwhile_is_said(
    book: Book, program: Program, running: RunDirLock, meanwhile: Callable[..., None]
) -> None:
    number = a_note(book)
    meanwhile(lambda: running.tell(None))
    code, _out, err = program("practise", str(number))
    assert (code, f"It goes on with note {number} when it runs again." in err) == (2, True)


def test_an_interrupted_command_leaves_it_to_the_server(
    book: Book, program: Program, running: RunDirLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_note(book)

    def interrupt(_seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(practise.time, "sleep", interrupt)
    code, out, _err = program("practise")
    assert (code, "The server goes on practising." in out) == (130, True)
    assert practices.load_all(book.db)[0].is_under_way


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [((), "There is no note to practise"), (("7",), "There is no note 7."), (("7", "--stop"), "There is no note 7.")],
)
def test_mistakes_are_said_in_a_sentence(
    book: Book, program: Program, arguments: tuple[str, ...], problem: str
) -> None:
    code, _out, err = program("practise", *arguments)
    assert (code, problem in err) == (2, True)


def test_a_server_that_cannot_practise_is_asked_for_nothing(
    book: Book, program: Program, running: RunDirLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_note(book)
    answers = {"practice": "This server does not learn, so it practises no notes."}
    monkeypatch.setattr(practise, "ready_state", lambda *_given: answers)
    code, _out, err = program("practise")
    assert (code, answers["practice"] in err) == (2, True)
    assert practices.load_all(book.db) == []


def test_status_says_how_far_it_is(book: Book, program: Program) -> None:
    assert status(program)["practice"] is None
    number = a_note(book)
    turns = book.change(begin, number, None, None)
    book.change(training.claim_turns, turns)
    book.change(training.apply_step, 1, 1, turns)
    out = program("status")[1]
    assert f"Practice: note {number} is being practised: step 1 of 24. It goes on when the server runs." in out
    told = status(program)
    assert (told["practice"]["made"], told["practice"]["steps"]) == (1, 24)
    assert not any(told["turns"].values()), "nobody had these conversations"
    book.change(practices.stop, number)
    assert "Practice:" not in program("status")[1]


def test_practised_answers_are_nobodys_verdicts_and_are_not_exported(
    book: Book, program: Program, tmp_path: Path
) -> None:
    asked = book.capture(a_turn("talk"))
    book.change(begin, a_note(book), *[asked] * verdicts.COLLAPSE_WINDOW)
    assert status(program)["judging_trouble"] == ""
    assert verdicts.summaries(book.db) == verdicts.counts(book.db) == verdicts.examples(book.db, 2) == []
    assert "No turn has been judged yet" in program("rejudge", "--judge", "feedback")[2]
    for form in ("trajectories", "jsonl"):
        assert "1 " in program("export", str(tmp_path / form), "--format", form)[1]
        assert len((tmp_path / form).read_text().splitlines()) == 1


def test_forgetting_deletes_what_was_practised(book: Book, program: Program) -> None:
    """With a message, for a note that was said in the session, or for anything of the user."""
    book.change(notes.add, "kim", "Call me Kim.")
    theirs = book.change(begin, 1, None)
    asked, said = book.capture(a_turn("asked")), book.capture(a_turn("said"))
    written, heard = a_note(book), a_note(book, "Use metric units.")
    book.change(lambda db: db.execute("UPDATE notes SET turn = ? WHERE number = ?", (said, heard)))
    answers = [*book.change(begin, written, asked, None), *book.change(begin, heard, None)]
    assert "Forgot 1 session with 1 turn: asked." in program("forget", "--session", "asked")[1]
    assert left(book, answers) == answers[1:]
    assert program("forget", "--session", "said")[0] == 0
    assert left(book, answers) == answers[1:2]
    assert "Forgot 1 note." in program("forget", "--user", "me")[1]
    assert left(book, [*answers, *theirs]) == theirs


def left(book: Book, turns: list[int]) -> list[int]:
    return [turn for turn in turns if practices.states(book.db, [turn])]
