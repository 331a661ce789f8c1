"""If the rules do not understand most of what somebody says, `status`, banner and demo say so, with examples."""

from pathlib import Path

import pytest

from openclaw_rl.app.config import load
from openclaw_rl.app.console import banner
from openclaw_rl.evals.demo import not_understood
from openclaw_rl.evals.personas.persona import load as load_persona
from openclaw_rl.evals.trial import TrialPlan
from openclaw_rl.ledger import turns, verdicts
from openclaw_rl.ledger.status import words_not_understood
from openclaw_rl.types import UNREAD, SampleKind, Source, State, Verdict
from support.commands import Program, status
from support.records import Book, a_turn

UNKNOWN = Verdict(reason=f"feedback: {UNREAD}")
GOOD = Verdict(1.0, Source.FEEDBACK, reason="feedback: acknowledgement")


def say(book: Book, words: str, verdict: Verdict = UNKNOWN, owner: str = "me") -> None:
    """Record a turn after which somebody said something, and its verdict."""
    turn = book.capture(a_turn(owner=owner))
    book.change(turns.set_next_state, turn, [{"role": "user", "content": words}])
    assert book.state(turn) is State.READY
    sample = SampleKind.RL if verdict.score else None
    assert book.change(verdicts.record, turn, verdict, sample, verdict.reason, 0)


def test_most_messages_that_are_not_understood_are_told_with_two_examples(book: Book) -> None:
    for number in range(5):
        say(book, f"Blub {number}.")
    say(book, "Thanks!", GOOD)
    words = words_not_understood(book.db)
    assert words.startswith("The rules did not understand 5 of the last 6 messages that are no questions")
    assert '"Blub 4." and "Blub 3."' in words
    assert "Blub 2" not in words
    assert book.ledger.read(words_not_understood) == words


def test_questions_and_the_verdicts_of_others_do_not_count(book: Book) -> None:
    for _ in range(20):
        say(book, "Why is the sky blue?")
    for _ in range(4):
        say(book, "Blub.")
        say(book, "Blub.", Verdict(1.0, Source.EXPLICIT))
    assert words_not_understood(book.db) == ""


def test_who_is_mostly_understood_hears_nothing(book: Book) -> None:
    for _ in range(5):
        say(book, "Blub.")
        say(book, "Thanks!", GOOD)
    assert words_not_understood(book.db) == ""


def test_it_is_told_about_the_one_who_is_not_understood(book: Book) -> None:
    for _ in range(8):
        say(book, "Blub.", owner="kim")
        say(book, "Thanks!", GOOD, owner="sam")
    assert "8 of the last 8 messages of kim" in words_not_understood(book.db)


def test_status_the_banner_and_the_demo_say_it(
    book: Book, program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(8):
        say(book, "Blub " * 40)
    words = words_not_understood(book.db)
    assert "…" in words
    assert len(words) < 400
    assert status(program)["not_understood"] == words
    assert "Not understood: The rules did not understand 8" in program("status")[1]
    plan = TrialPlan("opd", load_persona("brief"), 0, book.folder, 1, 1.0)
    assert not_understood(plan) == words
    assert not_understood(TrialPlan("opd", load_persona("brief"), 0, tmp_path / "none", 1, 1.0)) == ""
    told = words_not_understood(book.db, quotes=False)
    assert told.startswith("The rules did not understand 8")
    assert "Blub" not in told
    banner(load({"run_dir": tmp_path}, {}).config, "local", 0, 30000, told)
    assert told in capsys.readouterr().err
