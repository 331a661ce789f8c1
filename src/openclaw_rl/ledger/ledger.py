"""The ledger as the server uses it: one writer, any number of readers."""

import asyncio
import contextlib
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from openclaw_rl.ledger import changes, deletion, episodes, groups, policies, queries, updates, verdicts
from openclaw_rl.ledger.errors import CaptureSuspended, TooLate, sqlite_errors_as_sentences
from openclaw_rl.ledger.lease_book import LeaseBook
from openclaw_rl.ledger.note_keeper import NoteKeeper
from openclaw_rl.ledger.options import GROUP_SIZE, GROUP_TIMEOUT
from openclaw_rl.ledger.reader import LedgerReader
from openclaw_rl.ledger.schema import FILE, connect, create, migrate, transaction
from openclaw_rl.ledger.unread import unread_words
from openclaw_rl.ledger.writer import Writer
from openclaw_rl.rendering.tokenizer import TokenCache
from openclaw_rl.types import (
    BASE_VERSION,
    Batch,
    Counts,
    EpisodeMode,
    EpisodeResult,
    Feedback,
    HeardWishes,
    Queue,
    SampleKind,
    Scores,
    SessionKey,
    State,
    StoredTurn,
    Turn,
    TurnEpisode,
    Verdict,
    VerdictSummary,
)

T = TypeVar("T")

#: How much memory token sequences may take: a conversation's next request needs those of its last turn. Enough for
#: sixty conversations of 64,000 tokens.
CACHED_SEQUENCES_BYTES = 32_000_000


class Ledger:
    """The durable record of turns, verdicts and training steps.

    - A change that was awaited is on the disk: it survives `kill -9` and a power cut.
    - A change happens as a whole or not at all; changes are made in the order in which they were submitted.
    - A turn moves only along the transitions in `states`; every dropped turn has a reason.
    - A turn is in at most one step that counts in each epoch, also after a crash, a resume or a rollback.
    - The turns of an episode wait for its reward. Those of a group are trained on together, once it is settled.
    - Reads never wait for the writer. They happen at once, on the caller's thread, and are short look-ups by index.
    - If the disk is full or the database is locked, changes and reads fail with CaptureSuspended instead of holding up
      requests; writing resumes by itself.
    - A note is written with the verdict on the turn after which it was said: both or neither.
    - Any thread may read. Other processes may read and change the same ledger (`reader`, `offline`).
    """

    def __init__(self, directory: Path, group_size: int = GROUP_SIZE, group_timeout: float = GROUP_TIMEOUT) -> None:
        """`group_size` is for groups that do not state it; `group_timeout` is in seconds after a first reward."""
        self.group_size, self.group_timeout = group_size, group_timeout
        with sqlite_errors_as_sentences(directory):
            create(directory / FILE)
            connection = connect(directory / FILE)
            migrate(connection)
            # A database that can only be read is refused now, and not at the first turn.
            with transaction(connection):
                pass
            self.writer = Writer(connection)
        self.leases = LeaseBook(self.writer, self._read)
        self._file = directory / FILE
        self._own = threading.local()
        self._readers: list[sqlite3.Connection] = []
        self._sequences = TokenCache[int](CACHED_SEQUENCES_BYTES)
        self.notes = NoteKeeper(self._read, self._write)

    @property
    def folder(self) -> Path:
        return self._file.parent

    def close(self) -> None:
        self.writer.close()
        for reader in self._readers:
            reader.close()

    async def capture(
        self,
        turns: Sequence[Turn],
        source: str,
        base: int | None,
        keep: int,
        *,
        done: bool = False,
        episode: EpisodeMode | None = None,
    ) -> None:
        """Record the turns of one answered request. With `done`, their session ends; with `episode`, it is one."""

        def change(db: sqlite3.Connection) -> list[int]:
            if episode is not None:
                episodes.begin(db, turns[0].session, source, episode)
            numbers = changes.capture(db, turns, source, base, keep)
            if done:
                changes.close_session(db, turns[0].session)
            return numbers

        numbers = await self._write(change)
        for number, turn in zip(numbers, turns, strict=True):
            self._sequences.put(number, [*turn.prompt_ids, *turn.response_ids], base, keep)

    def set_next_state(self, turn: int, messages: Sequence[Mapping[str, Any]]) -> "Future[None]":
        """Not awaited, unlike the others: it is made before every change that is submitted after it."""
        return self.writer.submit(lambda db: changes.set_next_state(db, turn, messages))

    async def add_feedback(self, owner: str, completion: str, choice: int, feedback: Feedback) -> None:
        await self._write(lambda db: changes.add_feedback(db, owner, completion, choice, feedback))

    async def end_episode(self, key: SessionKey, result: EpisodeResult) -> None:
        """Record how an episode ended. Raises UnknownSession, AlreadyRewarded, TooLate and BadResult."""
        late = await self._write(lambda db: episodes.end(db, key, result, self.group_size))
        if late:
            # Raised only here: that the attempt came too late is recorded.
            raise TooLate("The group of this episode takes no further attempts: it is complete or has timed out.")

    async def forget(self, sessions: Sequence[int]) -> list[int]:
        """Delete sessions with everything in them; the numbers of their turns."""
        return await self._write(lambda db: episodes.forget(db, sessions))

    async def close_session(self, key: SessionKey) -> bool:
        return await self._write(lambda db: changes.close_session(db, key))

    async def close_idle(self, seconds: float) -> int:
        """Close the sessions that were idle for `seconds`; returns how many. Episodes without a reward have failed."""

        def change(db: sqlite3.Connection) -> int:
            before = time.time() - seconds
            return episodes.abandon_idle(db, before) + changes.close_idle(db, before)

        return await self._write(change)

    async def record_verdict(
        self,
        turn: int,
        verdict: Verdict,
        sample: SampleKind | None,
        reason: str,
        heard: int,
        step_reward: float | None = None,
        wishes: HeardWishes | None = None,
    ) -> bool:
        return await self._write(
            lambda db: verdicts.record(db, turn, verdict, sample, reason, heard, step_reward, wishes)
        )

    async def settle_sessions(self, at_least_one: bool) -> list[int]:
        if not self._read(verdicts.any_unsettled):
            return []
        return await self._write(lambda db: verdicts.settle_sessions(db, at_least_one))

    async def settle_groups(self, why_untrained: Callable[[TurnEpisode], str]) -> None:
        """Settle complete and timed-out groups. Turns whose reward teaches nothing, for a reason, are dropped."""
        before = time.time() - self.group_timeout
        if self._read(lambda db: groups.any_to_settle(db, before)):
            await self._write(lambda db: episodes.settle_groups(db, before, why_untrained))

    async def claim(self, count: int, step: int, max_staleness: int) -> list[int]:
        return await self._write(lambda db: updates.claim(db, count, step, max_staleness))

    async def claim_again(self, turns: Sequence[int]) -> list[int]:
        return await self._write(lambda db: updates.claim_again(db, turns))

    async def give_up(self, batches: Sequence[Batch]) -> None:
        await self._write(lambda db: updates.give_up(db, batches))

    async def release_batches(self) -> None:
        await self._write(updates.release)

    async def apply_step(
        self, step: int, version: int, turns: Sequence[int], metrics: Mapping[str, Any], parent: int
    ) -> None:
        await self._write(lambda db: updates.apply(db, step, version, turns, metrics, parent))

    async def add_policy(self, version: int, parent: int) -> None:
        await self._write(lambda db: policies.add(db, version, parent))

    async def infer_policies(self, steps: Mapping[int, int]) -> None:
        """Record policy versions that the ledger does not know, given the step of each."""
        await self._write(lambda db: updates.infer_policies(db, steps))

    async def quarantine(self, step: int, turns: Sequence[int], reason: str) -> None:
        await self._write(lambda db: updates.quarantine(db, step, turns, reason))

    async def reconcile(self, version: int, step: int, batches: Sequence[Batch]) -> list[int]:
        return await self._write(lambda db: updates.reconcile(db, version, step, batches))

    async def follow(self, version: int, *, retrain: bool = False) -> None:
        """Let exactly the steps in a policy count. The turns of the others are trained on again only with `retrain`."""
        await self._write(lambda db: updates.follow(db, version, undo_after=BASE_VERSION if retrain else None))

    async def drop(self, turn: int, reason: str) -> None:
        await self._write(lambda db: changes.move(db, turn, State.DROPPED, reason))

    async def set_logprobs(self, turn: int, version: int, scores: Scores, *, keep_verdict: bool = False) -> None:
        await self._write(lambda db: changes.set_logprobs(db, turn, version, scores, keep_verdict=keep_verdict))

    async def begin_epoch(self, epoch: int) -> int:
        """Let the imported turns that were trained on in fewer epochs be trained on again; how many they are."""
        return await self._write(lambda db: updates.begin_epoch(db, epoch))

    def first_unscored(self) -> int | None:
        return self._read(queries.first_unscored)

    def open_conversations(self, limit: int) -> list[tuple[int, str]]:
        return self._read(lambda db: queries.open_conversations(db, limit))

    def trainable(self) -> int:
        """How many turns a step could take now."""
        return self._read(groups.trainable)

    def queue(self) -> Queue:
        """Turns on their way to a training step."""
        return self._read(groups.queue)

    def counts(self) -> Counts:
        return self._read(queries.counts)

    def settles(self) -> bool:
        """Whether a group or a session waits to be settled."""
        before = time.time() - self.group_timeout
        return self._read(lambda db: groups.any_to_settle(db, before) or verdicts.any_unsettled(db))

    def constant_groups(self) -> int:
        """How many groups were dropped since the last step because all their rewards were equal."""
        return self._read(groups.constant_since_last_step)

    def versions_with_deleted_turns(self) -> set[int]:
        """The policy versions that were trained on turns that were deleted since."""
        return self._read(lambda db: policies.trained_on(db, policies.turns_deleted(db)))

    def line(self, version: int) -> list[int]:
        """A policy version and those that it was made from, the newest first."""
        return self._read(lambda db: policies.line(db, version))

    def lost(self, version: int) -> list[Batch]:
        return self._read(lambda db: updates.lost(db, version))

    def latest_version(self) -> int:
        return self._read(updates.latest_version)

    @contextlib.contextmanager
    def watch(self) -> Iterator[asyncio.Event]:
        """An event that is set whenever something has been written."""
        changed, loop = asyncio.Event(), asyncio.get_running_loop()

        def notify() -> None:
            # The writer may still write its last changes after the event loop was closed.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(changed.set)

        self.writer.listeners.append(notify)
        try:
            yield changed
        finally:
            self.writer.listeners.remove(notify)

    def reader(self) -> LedgerReader:
        """The read model, for this thread only."""
        return LedgerReader(self._reader(), self.folder)

    def ready_turns(self, besides: Collection[int], limit: int) -> list[int]:
        return self._read(lambda db: queries.ready_turns(db, besides, limit))

    def load_turn(self, turn: int) -> StoredTurn:
        """Everything about a turn. Raises UnknownTurn."""
        return self._read(lambda db: queries.load_turn(db, turn))

    def recent_verdicts(self, count: int) -> list[VerdictSummary]:
        return self._read(lambda db: verdicts.recent(db, count))

    def unread_words(self) -> str:
        """That the rules do not understand most of what somebody says, with examples; empty if they do."""
        return self._read(unread_words)

    def find_ancestor(
        self, owner: str, ends: Sequence[tuple[int, bytes]], session: str | None, claimed: set[int]
    ) -> queries.Ancestor | None:
        return self._read(lambda db: queries.find_ancestor(db, owner, ends, session, claimed))

    def last_waiting(self, session: SessionKey, ancestor: int | None = None) -> int | None:
        return self._read(lambda db: queries.last_waiting(db, session, ancestor))

    def main_turn(self, turn: int) -> queries.MainTurn | None:
        return self._read(lambda db: queries.main_turn(db, turn))

    def sequence(self, turn: int) -> list[int]:
        """A turn's tokens: prompt and response."""
        tokens = self._sequences.get(turn)
        if tokens is None:
            tokens, _prompt_length = self._read(lambda db: queries.sequence(db, turn))
            self._sequences.put(turn, tokens)
        return tokens

    def plain_sequence(self, turn: int) -> list[int]:
        """The same without notes in the prompt."""
        return self._read(lambda db: queries.plain_sequence(db, turn))

    def response(self, turn: int) -> list[int]:
        return self._read(lambda db: queries.response(db, turn))

    def earlier_responses(self, turn: int) -> list[list[int]]:
        """The responses of the turns that a turn continues, the latest first."""
        return self._read(lambda db: queries.earlier_responses(db, turn))

    def request(self, turn: int) -> list[dict[str, Any]]:
        """The messages that a turn was given."""
        return self._read(lambda db: queries.request(db, turn))

    def conversation(self, owner: str, completion: str) -> list[dict[str, Any]]:
        """The messages up to an owner's completion, its answer included. Raises UnknownTurn."""
        return self._read(lambda db: queries.conversation(db, owner, completion))

    def find_turn(self, owner: str, completion: str) -> StoredTurn:
        """The turn of an owner's completion (its first choice). Raises UnknownTurn."""
        return self._read(lambda db: queries.load_turn(db, queries.turns_of(db, owner, completion)[0]))

    async def delete_answer(self, owner: str, completion: str) -> None:
        """Delete one answer, for good. Raises UnknownTurn and CannotDelete."""
        await self._write(lambda db: deletion.delete_answer(db, owner, completion))

    async def _write(self, change: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.wrap_future(self.writer.submit(change))

    def _reader(self) -> sqlite3.Connection:
        """This thread's own connection: threads that share one can get each other's rows (CPython issue 118172)."""
        connection: sqlite3.Connection | None = getattr(self._own, "connection", None)
        if connection is None:
            connection = self._own.connection = connect(self._file, readonly=True)
            self._readers.append(connection)
        return connection

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        try:
            return query(self._reader())
        except sqlite3.Error as error:
            raise CaptureSuspended(str(error)) from error
