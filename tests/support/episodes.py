"""Episodes in a ledger, recorded as a server records them."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from openclaw_rl.ledger import episodes, verdicts
from openclaw_rl.ledger.turns import set_next_state
from openclaw_rl.methods.base import Method
from openclaw_rl.types import EpisodeMode, EpisodeResult, SessionKey, Source, State, TurnResult, Verdict
from support.records import Book, a_turn


def play(book: Book, name: str, turns: int = 1, mode: EpisodeMode = EpisodeMode.TRAIN, **given: Any) -> list[int]:
    """Record the turns of an episode without its reward."""
    numbers = []
    for _ in range(turns):
        turn = a_turn(name, **given)
        book.change(episodes.begin, turn.session, "header X-Session-Id", mode)
        numbers.append(book.capture(turn))
    return numbers


def end(book: Book, name: str, reward: float | None = None, owner: str = "me", **result: Any) -> str:
    """End an episode; why it came too late, if it did."""
    late: str = book.change(episodes.end, SessionKey(owner, name), EpisodeResult(reward, **result), 8)
    return late


def attempt(
    book: Book,
    group: str,
    name: str,
    reward: float | None,
    *,
    turns: int = 1,
    size: int = 2,
    steps: Mapping[int, float] | None = None,
    **given: Any,
) -> list[int]:
    """Record an attempt of a group that was rewarded or, without a reward, failed."""
    numbers = play(book, name, turns, **given)
    said = tuple(TurnResult(index, reward=value) for index, value in (steps or {}).items())
    error = "the environment broke" if reward is None else None
    end(book, name, reward, error=error, group=group, group_size=size, steps=said, task=f"task of {group}")
    return numbers


def judge(book: Book, method: Method) -> None:
    """Judge the ready turns as the judging loop does, and settle the groups that are complete."""

    def change(db: Any) -> None:
        for row in db.execute("SELECT number, session FROM turns WHERE state = ?", (State.READY,)).fetchall():
            said = db.execute("SELECT score FROM feedback WHERE turn = ?", (row["number"],)).fetchall()
            verdict = Verdict(said[-1]["score"], Source.ENVIRONMENT)
            sample, reason = method.sample_kind(verdict, episodes.of_turn(db, row["number"], row["session"]))
            assert verdicts.record(db, row["number"], verdict, sample, reason, len(said))
        episodes.settle_groups(db, time.time() - 600, method.why_untrained)

    book.change(change)


def let_groups_time_out(book: Book, method: Method) -> None:
    """Settle the groups that have a reward, whatever they still wait for."""
    book.change(episodes.settle_groups, time.time() + 1, method.why_untrained)


def advantages(book: Book, method: Method, turns: Sequence[int]) -> list[float]:
    """What each token of each turn learns from its reward."""
    return [method.lesson(book.read(turn)).advantages[0] for turn in turns]


def next_message(book: Book, turn: int) -> None:
    book.change(set_next_state, turn, [{"role": "user", "content": "thanks, that is right"}])
