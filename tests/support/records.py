"""Turns to record, and a ledger to record them in."""

import contextlib
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.sessions import move
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import capture, load_turn, record_turn, turn_numbers
from openclaw_rl.types import Continuation, SamplingParams, SessionKey, State, StoredTurn, Turn, TurnKind

_numbers = count()


def a_turn(session: str = "s", owner: str = "me", **given: Any) -> Turn:
    """A main turn with default values, except for those given."""
    number = next(_numbers)
    values: dict[str, Any] = {
        "completion": f"chatcmpl-{number}",
        "choice": 0,
        "session": SessionKey(owner, session),
        "kind": TurnKind.MAIN,
        "kind_reason": "chat",
        "version": 0,
        "messages": [{"role": "user", "content": f"question {number}"}],
        "message": {"role": "assistant", "content": f"answer {number}"},
        "prompt_ids": [1, 2, 3],
        "response_ids": [4, 5],
        "logprobs": [-0.5, -0.25],
        "sampling": SamplingParams(max_tokens=16),
        "finish_reason": "stop",
        "continuation": Continuation.NEW,
        "parent": None,
        "request_key": b"request %d" % number,
        "end_key": b"end %d" % number,
    }
    return Turn(**{**values, **given})


def a_side_turn(session: str = "s", owner: str = "me", **given: Any) -> Turn:
    return a_turn(session, owner, **{"kind": TurnKind.SIDE, "kind_reason": "session title", **given})


def stored_turns(folder: Path) -> list[StoredTurn]:
    """Every turn in the ledger of a run."""
    with contextlib.closing(connect(folder / FILE, readonly=True)) as db:
        return [load_turn(db, number) for number in turn_numbers(db)]


class Book:
    """A ledger in a folder, opened as the server opens it, and a reader of the same ledger."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ledger = Ledger(folder)
        self.db = connect(folder / FILE, readonly=True)

    def close(self) -> None:
        self.db.close()
        self.ledger.close()

    def change(self, change: Callable[..., Any], *arguments: Any) -> Any:
        """Make one change to the ledger and wait until it is durable."""
        return self.ledger.submit(change, *arguments).result(300)

    def capture(self, *turns: Turn, base: int | None = None, keep: int = 0) -> int:
        """Record the turns of a request; returns the number of the first."""
        numbers: list[int] = self.change(capture, turns, "header X-Session-Id", base, keep)
        return numbers[0]

    def put(self, state: State, **given: Any) -> int:
        """Record a turn and bring it to `state`."""
        number: int = self.change(record_turn, a_turn(**given), "test", None, 0, state)
        return number

    def move(self, turn: int, *states: State) -> None:
        for state in states:
            self.change(move, turn, state)

    def damage(self, turn: int) -> None:
        """Change a bit of the last message that a turn was given, as a bad disk does."""
        self.change(
            lambda db: db.execute(
                "UPDATE messages SET body = replace(body, '\"role\"', '\"sole\"') "
                "WHERE number = (SELECT request FROM turns WHERE number = ?)",
                (turn,),
            )
        )

    def read(self, number: int) -> StoredTurn:
        return load_turn(self.db, number)

    def state(self, number: int) -> State:
        return self.read(number).state

    def scalar(self, query: str, *values: Any) -> Any:
        return self.db.execute(query, values).fetchone()[0]

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in self.db.execute(query)]

    def everything(self) -> dict[str, Sequence[Any]]:
        """All rows of all tables."""
        tables = [name for (name,) in self.rows("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: self.rows(f"SELECT * FROM {table} ORDER BY 1, 2") for table in tables}

    def raw_bytes(self) -> bytes:
        """The database's files as they are on the disk."""
        return b"".join(path.read_bytes() for path in sorted(self.folder.glob(f"{FILE}*")))


def intercept(
    monkeypatch: pytest.MonkeyPatch, ledger: Ledger, change: Callable[..., Any], stand_in: Callable[..., Awaitable[Any]]
) -> None:
    """Let `stand_in` be called, without a connection, wherever the ledger is to make this one change."""
    write = ledger.write

    async def intercepted(asked: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if asked is change:
            return await stand_in(*arguments, **named)
        return await write(asked, *arguments, **named)

    monkeypatch.setattr(ledger, "write", intercepted)
