"""The ledger as the server uses it: one writer, any number of readers."""

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from openclaw_rl.ledger import packing, turns
from openclaw_rl.ledger.errors import CaptureSuspended, sqlite_errors_as_sentences
from openclaw_rl.ledger.options import GROUP_SIZE, GROUP_TIMEOUT
from openclaw_rl.ledger.schema import FILE, connect, create, prepare_to_write, snapshot, transaction
from openclaw_rl.rendering.memo import ID_BYTES, Memo, shared
from openclaw_rl.types import EpisodeMode, Turn

log = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")
#: A query or a change: a function of a connection, in the file of its topic (`turns`, `verdicts`, `training`, …).
Query = Callable[Concatenate[sqlite3.Connection, P], T]

#: How much memory token sequences may take: a conversation's next request needs those of its last turn. Enough for
#: sixty conversations of 64,000 tokens.
CACHED_SEQUENCES_BYTES = 64_000_000
#: How long a commit waits for a lock that another program holds: the longest that a request is held up by it.
LOCK_SECONDS = 2.0
#: How often a suspended writer tries again.
RETRY_SECONDS = 2.0
#: What SQLite raises when something is wrong with a change rather than with the database.
FAULTS_OF_A_CHANGE = (sqlite3.IntegrityError, sqlite3.ProgrammingError)
#: Changes in one commit.
MAX_GROUP = 256
#: How long a change that nobody waits for may wait for others to share a commit with.
SHARING_SECONDS = 0.02
#: After so many changed rows, the log is copied into the database. They take about 10 MB of the log.
ROWS_IN_LOG = 2000
#: Copies what no reader needs in the log, and stops nobody.
COPY_LOG = "PRAGMA wal_checkpoint(PASSIVE)"


@dataclass(frozen=True, slots=True)
class Pending:
    """A change and where its result goes."""

    change: Callable[[sqlite3.Connection], Any]
    done: "Future[Any]"
    is_awaited: bool


class Writer:
    """The one thread that writes to the ledger: many small changes, few commits.

    - Changes are made in the order they were submitted, each whole or not at all. A change does nothing but change the
      database, because it may be made twice.
    - Those that wait when a commit begins are committed together, so they share the cost of making it durable. One that
      nobody waits for is committed a moment later, if no other comes.
    - SQLite's log is copied into the database by another thread, so that no change waits for it. The writer copies what
      was written meanwhile, so that the log begins anew.
    - When the disk is full or another program holds the database, writing is suspended: changes fail at once instead
      of holding up the requests they belong to, and writing resumes by itself when a retry succeeds.
    """

    def __init__(self, connection: sqlite3.Connection, lock_seconds: float = LOCK_SECONDS) -> None:
        connection.execute(f"PRAGMA busy_timeout = {int(lock_seconds * 1000)}")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        self._connection = connection
        self._file = Path(connection.execute("PRAGMA database_list").fetchone()["file"])
        self._copying: threading.Thread | None = None
        self._rows_copied = connection.total_changes
        self.retry_seconds = RETRY_SECONDS
        self.max_group = MAX_GROUP
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._closed = False
        self._closing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self.suspended: str | None = None
        """Why writing is suspended, or None."""
        self.lost = 0
        """Changes that could not be written."""
        self.listeners: list[Callable[[], None]] = []
        """Called, on the writer's thread, when something has been written."""
        self._retry_at = 0.0
        self._thread.start()

    def submit(self, change: Callable[[sqlite3.Connection], T], *, is_awaited: bool = True) -> "Future[T]":
        """The change's result, once it is durable; CaptureSuspended or the change's own error otherwise."""
        done: Future[T] = Future()
        # A caller that stops waiting must not cancel the change: it is written all the same.
        done.set_running_or_notify_cancel()
        with self._closing:
            if self._closed:
                done.set_exception(CaptureSuspended("the ledger is closed"))
            else:
                self._queue.put(Pending(change, done, is_awaited))
        return done

    def close(self) -> None:
        """Write what was submitted, then stop."""
        with self._closing:
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        if self._copying is not None:
            self._copying.join()
        self._connection.close()

    def _run(self) -> None:
        while True:
            group = self._next_group()
            self._write([pending for pending in group if pending is not None])
            if None in group:
                return

    def _next_group(self) -> list[Pending | None]:
        group = [self._queue.get()]
        end = time.monotonic() + SHARING_SECONDS
        is_awaited = False
        while len(group) < self.max_group:
            is_awaited = is_awaited or group[-1] is None or group[-1].is_awaited
            try:
                group.append(self._queue.get(timeout=0 if is_awaited else max(0, end - time.monotonic())))
            except queue.Empty:
                break
        return group

    def _write(self, group: list[Pending]) -> None:
        if self.suspended is not None and time.monotonic() < self._retry_at:
            self._fail(group, self.suspended)
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            answers = self._apply_all(group)
            self._connection.execute("COMMIT")
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            self._suspend(group, str(error))
            return
        if self.suspended is not None:
            log.warning("The ledger can be written again; %d changes were lost meanwhile.", self.lost)
            self.suspended = None
        for answer in answers:
            answer()
        for listener in self.listeners:
            listener()
        # Where it cannot be copied, it cannot be written either, and the next commit says so.
        with contextlib.suppress(sqlite3.Error):
            self._copy_log()

    def _copy_log(self) -> None:
        """Keep the log short, if it is long."""
        if self._copying is None:
            if self._connection.total_changes - self._rows_copied > ROWS_IN_LOG:
                self._copying = threading.Thread(target=self._copy_aside, name="ledger-log", daemon=True)
                self._copying.start()
        elif not self._copying.is_alive():
            self._copying = None
            self._connection.execute(COPY_LOG)
            self._rows_copied = self._connection.total_changes

    def _copy_aside(self) -> None:
        with contextlib.suppress(sqlite3.Error), contextlib.closing(connect(self._file)) as connection:
            connection.execute(COPY_LOG)

    def _apply_all(self, group: list[Pending]) -> list[Callable[[], None]]:
        """Make the changes of a group; those that fail are undone. The returned functions report the results.

        If one fails, which is rare, all are made once more, each so that it can be undone alone.
        """
        try:
            return [partial(pending.done.set_result, pending.change(self._connection)) for pending in group]
        except Exception as problem:
            if is_fault_of_database(problem):
                raise
        self._connection.execute("ROLLBACK")
        self._connection.execute("BEGIN IMMEDIATE")
        return [self._apply(pending) for pending in group]

    def _apply(self, pending: Pending) -> Callable[[], None]:
        """Make one change of the group; if it fails, it alone is undone."""
        self._connection.execute("SAVEPOINT change")
        try:
            result = pending.change(self._connection)
        except Exception as problem:
            # Any error of one change must stop neither the others nor the thread.
            if is_fault_of_database(problem):
                raise
            self._connection.execute("ROLLBACK TO change")
            self._connection.execute("RELEASE change")
            return partial(pending.done.set_exception, problem)
        self._connection.execute("RELEASE change")
        return partial(pending.done.set_result, result)

    def _suspend(self, group: list[Pending], reason: str) -> None:
        if self.suspended is None:
            log.error("The ledger cannot be written (%s): requests are served, but not captured.", reason)
        self.suspended = reason
        self._retry_at = time.monotonic() + self.retry_seconds
        self._fail(group, reason)

    def _fail(self, group: list[Pending], reason: str) -> None:
        self.lost += len(group)
        for pending in group:
            pending.done.set_exception(CaptureSuspended(reason))


def is_fault_of_database(problem: Exception) -> bool:
    """Whether it was the database that failed, and not the change that was made."""
    return isinstance(problem, sqlite3.Error) and not isinstance(problem, FAULTS_OF_A_CHANGE)


#: A turn's tokens: prompt and response.
Tokens = tuple[list[int], list[int]]


class Sequences(Memo[int, Tokens]):
    """The tokens of turns."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(max_bytes, lambda _, parts: ID_BYTES * sum(map(len, parts)))


class Ledger:
    """The durable record of turns, verdicts and training steps.

    `read(query, …)` and `write(change, …)` call a function of a topic's file with a connection and the arguments.

    - A change that was awaited is on the disk: it survives `kill -9` and a power cut.
    - A change happens as a whole or not at all; changes are made in the order in which they were submitted.
    - A turn moves only along the transitions in `sessions`; every dropped turn has a reason.
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
        self._sequences = Sequences(CACHED_SEQUENCES_BYTES)

    def close(self) -> None:
        self.writer.close()
        for reader in self._readers:
            reader.close()

    @property
    def suspended(self) -> str | None:
        """Why nothing can be written at the moment, or None."""
        return self.writer.suspended

    def read(self, query: Query[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The answer to a query, at once. Raises CaptureSuspended, or the query's own error."""
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

    def submit_unawaited(self, change: Query[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """The same for a change that nobody waits for: it may be made a moment later, together with others."""
        return self.writer.submit(lambda db: change(db, *args, **kwargs), is_awaited=False)

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
            self._sequences.put(number, (turn.prompt_ids, shared(turn.response_ids)))

    def tokens(self, turn: int) -> Tokens:
        """A turn's tokens, for nobody to change. Raises UnknownTurn, DamagedTurn and CaptureSuspended."""
        parts = self._sequences.get(turn)
        if parts is None:
            ids, prompt_length = self.read(packing.sequence, turn)
            ids = shared(ids)
            parts = ids[:prompt_length], ids[prompt_length:]
            self._sequences.put(turn, parts)
        return parts

    def sequence(self, turn: int) -> list[int]:
        """The same in one list."""
        prompt, response = self.tokens(turn)
        return prompt + response

    def _reader(self) -> sqlite3.Connection:
        """This thread's own connection: threads that share one can get each other's rows (CPython issue 118172)."""
        connection: sqlite3.Connection | None = getattr(self._of_thread, "connection", None)
        if connection is None:
            connection = self._of_thread.connection = connect(self.folder / FILE, readonly=True)
            self._readers.append(connection)
        return connection
