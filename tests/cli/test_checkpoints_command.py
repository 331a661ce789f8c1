"""`openclaw-rl checkpoints` and, without a server, `openclaw-rl rollback`."""

import asyncio
from pathlib import Path

import pytest

from openclaw_rl.cli import main
from openclaw_rl.learn.checkpoints import Checkpoints
from openclaw_rl.learn.guard import FILE, GuardState
from openclaw_rl.ledger import training
from openclaw_rl.ledger.sessions import SET_ASIDE
from openclaw_rl.types import State
from support.commands import Program, status
from support.records import Book


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


def test_going_back_names_the_step_and_status_the_policy_that_will_serve(
    folder: Path, book: Book, program: Program
) -> None:
    async def write(target: Path) -> None:
        (target / "weights").write_text("w")

    saved = Checkpoints(folder / "checkpoints", 3)
    for step in (2, 4):
        book.change(training.apply_step, step, step, [book.put(State.BATCHED)])
        asyncio.run(saved.save(step, step, (), write))
    code, out, _err = program("rollback")
    assert (code, out) == (0, "The next start serves policy 5 (the weights of step 2). Learning continues from it.\n")
    told = status(program)
    assert (told["step"], told["policy_version"]) == (2, 5)
    code, out, _err = program("rollback")
    assert (code, out) == (0, "The next start serves policy 6 (the base model). Learning continues from it.\n")
    told = status(program)
    assert (told["step"], told["policy_version"]) == (0, 6)


def test_turns_that_the_guard_set_aside_are_shown_and_learned_from_all_the_same(
    folder: Path, book: Book, program: Program
) -> None:
    why = f"{SET_ASIDE}sensible answers to plain prompts fell from 64 to 9 of 64"
    kept, left = ([book.put(State.BATCHED)] for _ in range(2))
    book.change(training.apply_step, 1, 1, kept)
    book.change(training.apply_step, 2, 2, left)
    assert book.change(training.blame, [2], why) == 1
    book.change(training.add_policy, 3, 1)
    book.change(training.follow, 3)
    GuardState(cautious=why).write(folder / FILE)
    told = status(program)
    assert told["dropped"] == {why: 1}
    assert [(one["step"], one["turns"], one["reason"]) for one in told["quarantined"]] == [(2, left, why)]
    said = (0, "1 turn waits to be trained on again. The guard still watches.\n", "")
    assert program("relearn") == said
    assert [book.state(turn) for turn in (*kept, *left)] == [State.APPLIED, State.JUDGED]
    assert status(program)["quarantined"] == []
    assert GuardState.read(folder / FILE) == GuardState()
    # A rollback by somebody is no verdict on its turns.
    book.move(left[0], State.BATCHED)
    book.change(training.apply_step, 3, 4, left)
    book.change(training.add_policy, 5, 1)
    book.change(training.follow, 5)
    assert program("relearn") == (0, "The guard has set no turns aside.\n", "")
    assert book.state(left[0]) is State.APPLIED
