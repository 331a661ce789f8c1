"""The ledger as the server uses it: one writer, any number of readers."""

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from openclaw_rl.ledger import turns
from openclaw_rl.ledger.errors import CaptureSuspended, sqlite_errors_as_sentences
from openclaw_rl.ledger.options import GROUP_SIZE, GROUP_TIMEOUT
from openclaw_rl.ledger.schema import FILE, connect, create, prepare_to_write, snapshot, transaction
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.rendering.tokenizer import TokenCache
from openclaw_rl.types import EpisodeMode, Turn

T = TypeVar("T")
P = ParamSpec("P")
#: A query or a change: a function of a connection, in the file of its topic (`turns`, `verdicts`, `training`, …).
Query = Callable[Concatenate[sqlite3.Connection, P], T]

#: How much memory token sequences may take: a conversation's next request needs those of its last turn. Enough for
#: sixty conversations of 64,000 tokens.
CACHED_SEQUENCES_BYTES = 32_000_000


class Ledger:
    """The durable record of turns, verdicts and training steps.

    `read(query, …)` and `write(change, …)` call a function of a topic's file with a connection and the arguments.

    - A change that was awaited is on the disk: it survives `kill -9` and a power cut.
    - A change happens as a whole or not at all; changes are made in the order in which they were submitted.
    - A turn moves only along the transitions in `states`; every dropped turn has a reason.
    - A turn is in at most one step that counts in each epoch, also after a crash, a resume or a rollback.
    - The turns of an episode wait for its reward. Those of a group are trained on together, once it is settled.
    - Reads never wait for the writer. They happen at once, on the caller's thread, and are short look-ups by index.
    - If the disk is full or the database is locked, changes and reads fail with CaptureSuspended instead of holding up
      requests; writing resumes by itself.
    - A note is written with the verdict on the turn after which it was said: both or neither.
    - Any thread may read. Other processes may read and change the same ledger (`schema.open_ledger`).
    """

    def __init__(
        self,
        folder: Path,
        group_size: int = GROUP_SIZE,
        group_timeout: float = GROUP_TIMEOUT,
    ) -> None:
        """`group_size` is for groups that do not state it; `group_timeout` is in seconds after a first reward."""
        self.folder = folder
        self.group_size = group_size
        self.group_timeout = group_timeout
        with sqlite_errors_as_sentences(folder):
            create(folder / FILE)
            connection = connect(folder / FILE)
            prepare_to_write(connection, folder)
            # A database that can only be read is refused now, and not at the first turn.
            with transaction(connection):
                pass
            self.writer = Writer(connection)
        self._of_thread = threading.local()
        self._readers: list[sqlite3.Connection] = []
        self._sequences = TokenCache[int](CACHED_SEQUENCES_BYTES)

    def close(self) -> None:
        self.writer.close()
        for reader in self._readers:
            reader.close()

    @property
    def suspended(self) -> str | None:
        """Why nothing can be written at the moment, or None."""
        return self.writer.suspended

    def read(self, query: Query[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The answer to a query, at once. Raises CaptureSuspended."""
        try:
            return query(self._reader(), *args, **kwargs)
        except sqlite3.Error as error:
            raise CaptureSuspended(str(error)) from error

    async def write(self, change: Query[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a change; its result, once it is durable. Raises CaptureSuspended, or the change's own error."""
        return await asyncio.wrap_future(self.submit(change, *args, **kwargs))

    def submit(self, change: Query[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """The same, not awaited: the change is made before every change that is submitted after it."""
        return self.writer.submit(lambda db: change(db, *args, **kwargs))

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[sqlite3.Connection]:
        """One moment of the ledger for all reads in the block, on this thread. Raises LedgerUnusable.

        SQLite's log cannot shrink while it is open.
        """
        with sqlite_errors_as_sentences(self.folder), snapshot(self._reader()) as db:
            yield db

    @contextlib.contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something has been written."""
        changed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def notify() -> None:
            # The writer may still write its last changes after the event loop was closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        self.writer.listeners.append(notify)
        try:
            yield changed
        finally:
            self.writer.listeners.remove(notify)

    async def capture(
        self,
        answered: Sequence[Turn],
        source: str,
        base: int | None,
        keep: int,
        *,
        done: bool = False,
        episode: EpisodeMode | None = None,
    ) -> None:
        """Record the turns of one answered request (`turns.capture`), and keep their tokens for the next request."""
        numbers = await self.write(turns.capture, answered, source, base, keep, done=done, episode=episode)
        for number, turn in zip(numbers, answered, strict=True):
            self._sequences.put(number, [*turn.prompt_ids, *turn.response_ids], base, keep)

    def sequence(self, turn: int) -> list[int]:
        """A turn's tokens: prompt and response."""
        tokens = self._sequences.get(turn)
        if tokens is None:
            tokens, _prompt_length = self.read(turns.sequence, turn)
            self._sequences.put(turn, tokens)
        return tokens

    def _reader(self) -> sqlite3.Connection:
        """This thread's own connection: threads that share one can get each other's rows (CPython issue 118172)."""
        connection: sqlite3.Connection | None = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = self._of_thread.connection = connect(self.folder / FILE, readonly=True)
            self._readers.append(connection)
        return connection
