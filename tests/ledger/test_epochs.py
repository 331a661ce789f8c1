"""Several epochs over imported turns: which turns are trained on again, and what happens to their groups."""

import time

from openclaw_rl.ledger import episodes, groups, sessions, training, verdicts
from openclaw_rl.ledger.packing import pack_json
from openclaw_rl.ledger.turns import set_logprobs
from openclaw_rl.types import SampleKind, Scores, SessionKey, Source, State, Verdict
from support.episodes import attempt, judge
from support.methods import a_method
from support.records import Book

IMPORTED = "imported"
SCORES = Scores([-0.5, -0.5])


def train(book: Book, step: int, *turns: int) -> None:
    """Make a step of judged turns."""
    assert book.change(training.claim, len(turns), step - 1, 8) == sorted(turns)
    book.change(training.apply_step, step, step, turns)


def judged(book: Book, owner: str, score: float = 1.0) -> int:
    turn = book.put(State.READY, owner=owner)
    book.change(verdicts.record, turn, Verdict(score, Source.LLM), SampleKind.RL, "", 0)
    return turn


async def test_imported_turns_are_trained_on_once_more_in_each_epoch_and_others_are_not(book: Book) -> None:
    first, second = judged(book, IMPORTED), judged(book, IMPORTED)
    user = judged(book, "me")
    train(book, 1, first, second, user)
    assert await book.ledger.write(training.begin_epoch, 1) == 0
    assert await book.ledger.write(training.begin_epoch, 2) == 2
    assert [book.state(turn) for turn in (first, second, user)] == [State.CAPTURED, State.CAPTURED, State.APPLIED]
    # The verdict is kept, so that the turn need not be judged again.
    for turn in (first, second):
        await book.ledger.write(set_logprobs, turn, 1, SCORES, keep_verdict=True)
        assert (book.state(turn), book.read(turn).version) == (State.JUDGED, 1)
    train(book, 2, first, second)
    assert await book.ledger.write(training.begin_epoch, 2) == 0
    assert await book.ledger.write(training.begin_epoch, 3) == 2
    await book.ledger.write(set_logprobs, first, 2, SCORES, keep_verdict=False)
    assert book.state(first) is State.READY


async def test_turns_of_a_step_that_was_rolled_back_are_left_alone(book: Book) -> None:
    turn = judged(book, IMPORTED)
    train(book, 1, turn)
    await book.ledger.write(training.follow, 0)
    assert await book.ledger.write(training.begin_epoch, 2) == 0
    assert book.state(turn) is State.APPLIED


async def test_a_lost_step_of_a_second_epoch_is_made_again_with_its_turns(book: Book) -> None:
    turn = judged(book, IMPORTED)
    train(book, 1, turn)
    await book.ledger.write(training.begin_epoch, 2)
    await book.ledger.write(set_logprobs, turn, 1, SCORES, keep_verdict=True)
    train(book, 2, turn)
    # A crash: the last saved state holds the first step.
    await book.ledger.write(training.reconcile, 1, 1, ())
    assert book.state(turn) is State.JUDGED
    (lost,) = book.ledger.read(training.steps_after, 1)
    assert await book.ledger.write(training.claim_turns, lost.turns) == [turn]
    await book.ledger.write(training.apply_step, 2, 2, [turn], {}, 1)
    assert await book.ledger.write(training.begin_epoch, 2) == 0


def settles(book: Book) -> bool:
    """Whether a group or a session waits to be settled."""
    return groups.any_to_settle(book.db, time.time() - 600) or verdicts.any_unsettled(book.db)


async def test_a_group_waits_until_all_its_turns_are_scored_again(book: Book) -> None:
    method = a_method("rl", baseline="group")
    (good,) = attempt(book, "g", "a", 1.0)
    (bad,) = attempt(book, "g", "b", 0.0)
    judge(book, method)
    await book.ledger.write(verdicts.settle_sessions, at_least_one=False)
    train(book, 1, good, bad)
    book.change(lambda db: db.execute("UPDATE sessions SET owner = ?", (IMPORTED,)))
    assert await book.ledger.write(training.begin_epoch, 2) == 2
    await book.ledger.write(set_logprobs, good, 1, SCORES, keep_verdict=True)
    assert (book.ledger.read(groups.trainable), settles(book)) == (0, False)
    await book.ledger.write(set_logprobs, bad, 1, SCORES, keep_verdict=True)
    assert settles(book)
    await book.ledger.write(episodes.settle_groups, time.time() - 600, method.why_untrained)
    assert (book.ledger.read(groups.trainable), settles(book)) == (2, False)
    train(book, 2, good, bad)


async def test_an_imported_session_gets_its_good_turn_only_once_all_its_turns_are_judged(book: Book) -> None:
    first, second = (book.put(State.CAPTURED, owner=IMPORTED, logprobs=[]) for _ in range(2))
    for turn in (first, second):
        came = [{"role": "user", "content": "hm"}]
        book.change(
            lambda db, turn=turn, came=came: db.execute(
                "UPDATE turns SET next_state = ? WHERE number = ?", (pack_json(came), turn)
            )
        )
    book.change(sessions.close_session, SessionKey(IMPORTED, "s"))
    assert not settles(book)
    for turn, score in ((first, 0.0), (second, -1.0)):
        await book.ledger.write(set_logprobs, turn, 0, SCORES)
        assert await book.ledger.write(verdicts.settle_sessions, at_least_one=True) == []
        sample = SampleKind.RL if score else None
        assert await book.ledger.write(verdicts.record, turn, Verdict(score, Source.LLM), sample, "neutral", 0)
    assert await book.ledger.write(verdicts.settle_sessions, at_least_one=True) == [first]
    assert book.read(first).state is State.JUDGED
