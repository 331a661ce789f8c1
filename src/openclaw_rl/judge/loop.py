"""Judges turns as they become ready, several at a time, for as long as the server runs."""

import asyncio
import contextlib
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from prometheus_client import CollectorRegistry, Counter, Histogram

from openclaw_rl.aio import wait_at_most
from openclaw_rl.judge.judges.base import (
    TIMED_OUT,
    WISHES_ALONE,
    Case,
    JudgeDown,
    JudgeError,
    JudgePanel,
    agreement,
    said_after,
    words_around,
)
from openclaw_rl.judge.judges.llm import LlmJudge
from openclaw_rl.judge.rules import read_wishes, ready, split_wanted
from openclaw_rl.judge.rules.kept import keeps
from openclaw_rl.judge.teacher import NoteDistiller, Teacher
from openclaw_rl.ledger import episodes, groups, notes, turns, verdicts
from openclaw_rl.ledger.errors import DamagedTurn, LedgerError, UnknownTurn
from openclaw_rl.ledger.sessions import move
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import load_turn, ready_turns
from openclaw_rl.methods.base import Method
from openclaw_rl.rendering.chat import Message, content_text
from openclaw_rl.rendering.clients import is_passing, message_words
from openclaw_rl.types import HeardWishes, Question, Source, State, StoredTurn, Verdict, Wish

log = logging.getLogger(__name__)

#: A turn is given up after this many trials.
TRIALS = 3
#: Why a turn of another API's model is not trained on.
AS_TEXT = "recorded as text: the weights are elsewhere"
#: From a rule to a reasoning model.
LATENCY_BUCKETS = (0.001, 0.01, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


@dataclass(slots=True)
class Retry:
    """A turn that could not be judged yet."""

    failures: int = 0
    not_before: float = 0.0
    answered: int = 0
    """How many calls the judges had answered when this turn failed."""


class JudgeMetrics:
    """Counters and histograms of judging, in a shared registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._verdicts = Counter(
            "openclaw_verdicts", "Verdicts by source and sign.", ["source", "score"], registry=registry
        )
        self._abstentions = Counter(
            "openclaw_abstentions", "Turns without a score although one was asked for.", ["reason"], registry=registry
        )
        self._agreement = Histogram(
            "openclaw_vote_agreement",
            "The winner's share of the valid votes on the score.",
            buckets=(0.34, 0.5, 0.67, 0.8, 1.0),
            registry=registry,
        )
        self._seconds = Histogram(
            "openclaw_judge_seconds", "Time to a verdict.", buckets=LATENCY_BUCKETS, registry=registry
        )
        self._tokens = Counter("openclaw_judge_tokens", "Tokens read and written by the judge.", registry=registry)
        self.failures = Counter("openclaw_judge_failures", "Trials that gave no verdict.", registry=registry)
        self._saved = Counter(
            "openclaw_judge_calls_saved",
            "Answers of a language model that cheaper judges made needless.",
            registry=registry,
        )

    def count(self, verdict: Verdict, scored: bool, saved: int) -> None:
        """Count a verdict. `scored`: a score was asked for. `saved`: votes of a model that were not needed."""
        if verdict.score is not None:
            sign = "good" if verdict.score > 0 else "bad" if verdict.score < 0 else "neutral"
            self._verdicts.labels(str(verdict.source), sign).inc()
        elif scored:
            # The full reason would make one time series per message.
            self._abstentions.labels(verdict.reason.partition(" failed:")[0] or "no reason given").inc()
        share = agreement([vote for vote in verdict.votes if vote.question is Question.SCORE])
        if share is not None:
            self._agreement.observe(share)
        self._seconds.observe(verdict.seconds)
        self._tokens.inc(sum(vote.tokens for vote in verdict.votes))
        self._saved.inc(saved)


class JudgeLoop:
    """Judges ready turns and records a verdict for each.

    Guarantees:
    - A verdict, the turn's new state and the notes of what the user replied are one transaction: after a crash a turn
      is either judged or still ready.
    - What a user asked for as a conversation began becomes a note before the turn is judged, whether or not it ever is.
    - A turn waits without limit for a judge that is down; `down` says why.
    - A turn that its judge cannot judge gets no score after TRIALS trials, and the reason is recorded.
    - An error in one turn does not stop the judging of others. A turn that cannot be read is dropped with the reason.
    """

    def __init__(
        self,
        ledger: Ledger,
        panel: JudgePanel,
        teacher: Teacher | None,
        method: Method,
        metrics: JudgeMetrics,
        *,
        workers: int = 4,
        judges_steps: bool = False,
        keeps_notes: bool = False,
        judge_reads_wishes: bool = False,
        distiller: NoteDistiller | None = None,
        first_pause: float = 1.0,
        idle_seconds: float = 5.0,
    ) -> None:
        """With `judges_steps`, judges score the turns of episodes too, where the environment gives no step reward.

        With `keeps_notes`, wishes in what users say become notes. Rules read them, and with `judge_reads_wishes` a
        judge does; then the rules only stand in for it. A `distiller` is for a method that distils notes.
        `first_pause` is the time before the second trial; each further pause is four times as long. The loop looks for
        turns at least every `idle_seconds`, even if the ledger reports no change.
        """
        self.ledger, self.panel, self.teacher = ledger, panel, teacher
        self.method, self.metrics, self.workers = method, metrics, workers
        self.keeps_notes, self.judge_reads_wishes = keeps_notes, judge_reads_wishes
        self.distiller = distiller
        self._first_pause = first_pause
        self._idle_seconds = idle_seconds
        self._step_judges = panel.without_feedback() if judges_steps else None
        self._llm = next((judge for judge in panel.judges if isinstance(judge, LlmJudge)), None)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._retries: dict[int, Retry] = {}
        self._logged_collapse = ""
        self._logged_down: str | None = None
        self._looked = 0.0
        self._heard = 0
        """The last turn whose opening was read."""

    @property
    def down(self) -> str | None:
        """Why turns wait for a judge or the teacher; None if they do not."""
        asked = (self.teacher, self.distiller)
        return self.panel.down or next((part.down for part in asked if part and part.down), None)

    async def run(self) -> None:
        """Judge until cancelled."""
        try:
            with self.ledger.watch() as changed:
                while True:
                    changed.clear()
                    try:
                        await self._hear_openings()
                        self._start_ready(changed)
                        await self._settle()
                    except LedgerError as error:
                        log.warning("Judging waits for the ledger: %s", error)
                    except Exception:
                        # A bug of ours or of a custom method must not end all judging.
                        log.exception("Groups and sessions could not be settled.")
                    await wait_at_most(self._pause(), changed.wait())
        finally:
            await self._stop()

    async def _stop(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _hear_openings(self) -> None:
        """Keep the wishes in requests with which conversations began, which may never get a verdict."""
        for turn, created in self.ledger.read(notes.openings, self._heard) if self.keeps_notes else ():
            await ready()
            try:
                wishes = asked_in(self.ledger.read(turns.request, turn), created)
            except (LedgerError, ValueError) as error:
                # It was deleted, or is damaged. The others must not wait for it.
                log.warning("The request of turn %d cannot be read for wishes: %s", turn, error)
                wishes = ()
            if wishes:
                await self.ledger.write(notes.keep_asked, turn, wishes)
            self._heard = turn
            # After a start there may be thousands, and requests must not wait for all of them.
            await asyncio.sleep(0)

    def _start_ready(self, changed: asyncio.Event) -> None:
        """Start to judge as many ready turns as there are free workers."""
        now = self._looked = time.monotonic()
        waiting = {turn for turn, retry in self._retries.items() if retry.not_before > now}
        free = self.workers - len(self._running)
        for turn in self.ledger.read(ready_turns, {*self._running, *waiting}, free) if free > 0 else ():
            self._running[turn] = asyncio.create_task(self._judge(turn, changed))

    def _pause(self) -> float:
        """Seconds until the next retry is due."""
        # Retries that were due at the last look already run, wait for a worker, or were deleted.
        later = [retry.not_before for retry in self._retries.values() if retry.not_before > self._looked]
        return min([self._idle_seconds, *(max(0.0, moment - time.monotonic()) for moment in later)])

    async def _judge(self, turn: int, done: asyncio.Event) -> None:
        try:
            await self._try(turn)
        finally:
            del self._running[turn]
            done.set()

    async def _try(self, turn: int) -> None:
        """Judge one turn, or plan a retry."""
        try:
            stored = self.ledger.read(load_turn, turn)
            await self._store(stored, await self._consider(stored), await self._judge_step(stored))
            self._retries.pop(turn, None)
        except UnknownTurn:
            self._retries.pop(turn, None)  # it was deleted meanwhile
        except DamagedTurn as error:
            log.warning("Turn %d is not judged: %s.", turn, error)
            await self._drop(turn, error.reason)
        except LedgerError as error:
            log.warning("Turn %d will be judged again: %s", turn, error)
            self._retry_after(turn, self._first_pause)
        except (JudgeError, TimeoutError) as error:
            self.metrics.failures.inc()
            await self._failed(turn, error)
        except Exception:
            # A bug of ours must not stop the judging of other turns, nor be retried without end.
            log.exception("Turn %d could not be judged.", turn)
            await self._failed(turn, JudgeError("an error of the program, which its log shows"))

    async def _consider(self, turn: StoredTurn) -> Verdict:
        """Ask the judges, and the teacher about their hints."""
        verdict = await self._ask(turn)
        if verdict.hints and self.teacher is not None:
            verdict = replace(verdict, hints=await self.teacher.consider(turn, verdict.hints))
        return verdict if self.distiller is None else await self.distiller.consider(turn, verdict)

    async def _ask(self, turn: StoredTurn) -> Verdict:
        """Ask the judges what the method needs, and for wishes if one of them reads wishes."""
        case, questions = Case.of(turn), self.method.questions
        if self.judge_reads_wishes and self.keeps_notes:
            await ready()
            case = replace(
                case, user=words_around(turn, self.ledger.read(notes.for_new_conversation, turn.session.owner))
            )
        return await self.panel.verdict(case, questions | WISHES_ALONE if case.user else questions)

    async def _judge_step(self, turn: StoredTurn) -> float | None:
        """What the judges give to a turn as a step of its episode; None if they are not asked or cannot say."""
        episode, judges = turn.episode, self._step_judges
        if judges is None or episode is None or episode.step_reward is not None or not turn.next_state:
            return None
        return (await judges.verdict(Case.of(turn), frozenset([Question.SCORE]))).score

    async def _store(self, turn: StoredTurn, verdict: Verdict, step_reward: float | None = None) -> None:
        sample, reason = self.method.sample_kind(verdict, turn.episode)
        if turn.is_text:
            # Without its tokens and their log-probs there is no ratio to train on.
            sample, reason = None, AS_TEXT
        heard, wishes = len(turn.feedback), None
        if self.keeps_notes:
            await ready()
            wishes = wishes_around(turn)
            if (read := verdict.wishes) is not None:
                wishes = replace(wishes, asked=read.asked, replied=read.replied, wanted=read.wanted or wishes.wanted)
        if await self.ledger.write(verdicts.record, turn.number, verdict, sample, reason, heard, step_reward, wishes):
            log.debug("Turn %d: score %s, %s", turn.number, verdict.score, sample or reason)
            self.metrics.count(verdict, Question.SCORE in self.method.questions, self._saved_votes(verdict))
            if verdict.source is not Source.ENVIRONMENT:
                self._warn_of_collapse()

    def _saved_votes(self, verdict: Verdict) -> int:
        """How many votes of the language model were not needed."""
        if self._llm is None or verdict.source is None:
            return 0
        asked = {vote.question for vote in verdict.votes}
        return self._llm.params.votes * len(self.method.questions - asked)

    async def _failed(self, turn: int, error: Exception) -> None:
        """Plan a retry, or give the turn up if it is the turn's fault."""
        retry = self._retries.setdefault(turn, Retry(answered=-1))
        answered = self.panel.answered
        away = isinstance(error, JudgeDown | TimeoutError)
        suspect = getattr(error, "suspect", True)
        # A judge that is down is the turn's fault only if it failed on this turn and answered others meanwhile.
        if not away or (suspect and answered > retry.answered):
            retry.failures += 1
        retry.answered = answered
        reason = str(error) or TIMED_OUT
        if retry.failures >= TRIALS:
            await self._give_up(turn, reason)
            return
        pause = max(self._first_pause * 4 ** (max(1, retry.failures) - 1), getattr(error, "retry_after", 0.0))
        self._retry_after(turn, pause)
        log.debug("Turn %d will be judged again in %.0f s: %s", turn, pause, reason)
        self._log_if_down()

    def _log_if_down(self) -> None:
        """Log once, not for each turn, that turns wait for their judge."""
        if self.down and self.down != self._logged_down:
            log.warning("Turns wait for their judge: %s", self.down)
        self._logged_down = self.down

    def _retry_after(self, turn: int, pause: float) -> None:
        self._retries.setdefault(turn, Retry()).not_before = time.monotonic() + pause

    async def _drop(self, turn: int, reason: str) -> None:
        """Drop a turn, or try it again later."""
        try:
            await self.ledger.write(move, turn, State.DROPPED, reason)
            self._retries.pop(turn, None)
        except UnknownTurn:
            self._retries.pop(turn, None)
        except LedgerError:
            self._retry_after(turn, self._first_pause)

    async def _give_up(self, turn: int, reason: str) -> None:
        verdict = Verdict(reason=f"{TRIALS} trials failed: {reason}")
        try:
            stored = self.ledger.read(load_turn, turn)
            if stored.episode is not None:
                # Only its step or its hint could not be judged. The environment's reward counts.
                with contextlib.suppress(JudgeError, TimeoutError):
                    verdict = await self._ask(stored)
            await self._store(stored, verdict)
            self._retries.pop(turn, None)
        except LedgerError:
            self._retry_after(turn, self._first_pause)
        except Exception:
            # A bug of ours or of a custom method, which met this turn again: it must not be met without end.
            log.exception("Turn %d is dropped: no verdict on it can be recorded.", turn)
            await self._drop(turn, verdict.reason)

    async def _settle(self) -> None:
        """Settle groups, and sessions that have ended: if only scores are trained on, each gets a good turn."""
        opened_before = time.time() - self.ledger.group_timeout
        if self.ledger.read(groups.any_to_settle, opened_before):
            await self.ledger.write(episodes.settle_groups, opened_before, self.method.why_untrained)
        if not self.ledger.read(verdicts.any_unsettled):
            return
        for turn in await self.ledger.write(verdicts.settle_sessions, self.method.rewards_best_turn):
            log.info("Turn %d counts as good: it is the best turn of a session without a good one.", turn)

    def _warn_of_collapse(self) -> None:
        warning = self.ledger.read(verdicts.judging_trouble)
        if warning and warning != self._logged_collapse:
            log.warning(warning)
        self._logged_collapse = warning


def wishes_around(turn: StoredTurn) -> HeardWishes:
    """The lasting wishes in what the user said after a turn and in explicit feedback on it, and the notes it keeps to.

    It also has the answer that the user wanted, if they wrote it.

    Results of tools yield none, and neither do episodes, where an environment speaks.
    """
    if turn.episode is not None:
        return HeardWishes()
    case = Case.of(turn)
    parts = [(*split_wanted(text), when) for text, when in said_after(turn)]
    replied = [
        replace(wish, said=when)
        for text, _wanted, when in parts
        for wish in read_wishes(text, case.request, case.response)
    ]
    wanted = [wanted for _text, wanted, _when in parts if wanted]
    wanted += [word.correction for word in turn.feedback if word.correction and word.score < 0]
    answer = content_text(turn.message.get("content"))
    kept = {note.number: keeps(note.text, answer) for note in turn.notes if not note.question}
    shown = {number: result for number, result in kept.items() if result is not None}
    return HeardWishes(last_of_each(replied), wanted[-1] if wanted else "", shown)


def asked_in(messages: Sequence[Message], said: float) -> tuple[Wish, ...]:
    """The lasting wishes in the request that begins a conversation; none if it continues one."""
    if any(message["role"] == "assistant" for message in messages):
        return ()
    words = [message_words(message) for message in messages if message["role"] == "user" and not is_passing(message)]
    return last_of_each([replace(wish, said=said) for text in words for wish in read_wishes(text)])


def last_of_each(wishes: Sequence[Wish]) -> tuple[Wish, ...]:
    """The lasting ones among wishes. What was said last counts."""
    kept: list[Wish] = []
    for wish in wishes:
        if wish.lasting:
            kept = [*(older for older in kept if not wish.replaces(older)), wish]
    return tuple(kept)
