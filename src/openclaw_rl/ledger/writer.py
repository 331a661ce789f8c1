"""The one thread that writes to the ledger: many small changes, few commits.

Changes that wait when a commit begins are committed together, so they share the cost of making a commit durable.
When the disk is full or another program holds the database, writing is suspended: changes fail at once instead of
holding up the requests they belong to, and writing resumes by itself when a retry succeeds.
"""

import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from openclaw_rl.ledger.errors import CaptureSuspended

log = logging.getLogger(__name__)


T = TypeVar("T")
Change = Callable[[sqlite3.Connection], Any]

#: How long a commit waits for a lock that another program holds: the longest that a request is held up by it.
LOCK_SECONDS = 2.0
#: How often a suspended writer tries again.
RETRY_SECONDS = 2.0
#: What SQLite raises when something is wrong with a change rather than with the database.
FAULTS_OF_A_CHANGE = (sqlite3.IntegrityError, sqlite3.ProgrammingError)
#: Changes in one commit.
MAX_GROUP = 256


@dataclass(frozen=True, slots=True)
class Pending:
    """A change and where its result goes."""

    change: Change
    done: "Future[Any]"


class Writer:
    """Applies changes in the order they were submitted, each whole or not at all."""

    def __init__(self, connection: sqlite3.Connection, lock_seconds: float = LOCK_SECONDS) -> None:
        connection.execute(f"PRAGMA busy_timeout = {int(lock_seconds * 1000)}")
        self._connection = connection
        self.retry_seconds = RETRY_SECONDS
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

    def submit(self, change: Callable[[sqlite3.Connection], T]) -> "Future[T]":
        """The change's result, once it is durable; CaptureSuspended or the change's own error otherwise."""
        done: Future[T] = Future()
        # A caller that stops waiting must not cancel the change: it is written all the same.
        done.set_running_or_notify_cancel()
        with self._closing:
            if self._closed:
                done.set_exception(CaptureSuspended("the ledger is closed"))
            else:
                self._queue.put(Pending(change, done))
        return done

    def close(self) -> None:
        """Write what was submitted, then stop."""
        with self._closing:
            self._closed = True
            self._queue.put(None)
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        while True:
            group = [self._queue.get()]
            while len(group) < MAX_GROUP and not self._queue.empty():
                group.append(self._queue.get())
            self._write([pending for pending in group if pending is not None])
            if None in group:
                return

    def _write(self, group: list[Pending]) -> None:
        if self.suspended is not None and time.monotonic() < self._retry_at:
            self._fail(group, self.suspended)
            return
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            answers = [self._apply(pending) for pending in group]
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

    def _apply(self, pending: Pending) -> Callable[[], None]:
        """Make one change of the group; if it fails, it alone is undone. The returned function reports the result."""
        self._connection.execute("SAVEPOINT change")
        try:
            result = pending.change(self._connection)
        except Exception as problem:
            # Any error of one change must stop neither the others nor the thread.
            if isinstance(problem, sqlite3.Error) and not isinstance(problem, FAULTS_OF_A_CHANGE):
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
