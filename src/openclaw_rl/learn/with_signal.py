"""The turns of a batch that a method can learn from."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from openclaw_rl.ledger.errors import UnknownTurn
from openclaw_rl.ledger.states import move
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import load_turn
from openclaw_rl.methods.base import Lesson, Method, NoSignal
from openclaw_rl.types import State, StoredTurn


async def load_with_signal(
    ledger: Ledger, method: Method, numbers: Sequence[int], check: Callable[[Lesson], None] = lambda _lesson: None
) -> list[StoredTurn]:
    """Load the turns that the method can learn from, and drop the others with the reason.

    `check` raises NoSignal for a lesson that the trainer cannot use. Turns that have just been deleted are left out.
    """
    # In a thread: groups make large batches, and the server must answer meanwhile.
    turns, without_signal = await asyncio.to_thread(_load, ledger, method, numbers, check)
    for number, error in without_signal:
        with contextlib.suppress(UnknownTurn):
            await drop_without_signal(ledger, number, error)
    return turns


async def drop_without_signal(ledger: Ledger, number: int, error: NoSignal) -> None:
    """Raises UnknownTurn."""
    await ledger.write(move, number, State.DROPPED, f"no signal: {error}")


def _load(
    ledger: Ledger, method: Method, numbers: Sequence[int], check: Callable[[Lesson], None]
) -> tuple[list[StoredTurn], list[tuple[int, NoSignal]]]:
    turns: list[StoredTurn] = []
    without_signal: list[tuple[int, NoSignal]] = []
    for number in numbers:
        try:
            turn = method.prepared(ledger.read(load_turn, number))
            check(method.lesson(turn))
            turns.append(turn)
        except UnknownTurn:
            continue
        except NoSignal as error:
            without_signal.append((number, error))
    return turns, without_signal
