"""Judges turns as they become ready, several at a time, for as long as the server runs.

A verdict and the turn's next state are one transaction, so a crash leaves a turn either judged or ready to be judged
again. A turn whose judge is away waits without end; one that its judge cannot deal with abstains after some trials.
"""

import asyncio
import contextlib
import logging
import time
from dataclasses import dataclass, replace

from openclaw_rl.judge.case import Case
from openclaw_rl.judge.dispatch import Signals, dispatch
from openclaw_rl.judge.errors import JudgeDown, JudgeError
from openclaw_rl.judge.judges import LlmJudge, Panel
from openclaw_rl.judge.metrics import JudgeMetrics
from openclaw_rl.judge.teacher import Teacher
from openclaw_rl.ledger.errors import LedgerError, UnknownTurn
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.ledger.status import COLLAPSE_WINDOW, judging_trouble
from openclaw_rl.types import Question, StoredTurn, Verdict

log = logging.getLogger(__name__)

#: Trials of a turn before it is given up, and the pause before the second; each is four times the one before.
TRIALS = 3
FIRST_PAUSE = 1.0
#: Turns are looked for at least so often, also when nothing seems to have happened.
IDLE_SECONDS = 5.0


@dataclass(slots=True)
class Trouble:
    """A turn that could not be judged yet."""

    failures: int = 0
    not_before: float = 0.0
    answered: int = 0
    """How often the judge had answered anybody when this turn failed."""


class JudgeLoop:
    """The way of turns from ready to judged."""

    def __init__(
        self,
        ledger: Ledger,
        panel: Panel,
        teacher: Teacher | None,
        signals: Signals,
        metrics: JudgeMetrics,
        *,
        workers: int = 4,
    ) -> None:
        self.ledger, self.panel, self.teacher = ledger, panel, teacher
        self.signals, self.metrics, self.workers = signals, metrics, workers
        self._llm = next((judge for judge in panel.judges if isinstance(judge, LlmJudge)), None)
        self._running: dict[int, asyncio.Task[None]] = {}
        self._troubles: dict[int, Trouble] = {}
        self._warned = self._told = ""
        self._looked = 0.0

    @property
    def down(self) -> str:
        """Why turns wait for their judge, if they do."""
        return (self._llm.breaker.reason if self._llm else "") or (self.teacher.down if self.teacher else "")

    async def run(self) -> None:
        """Judge until cancelled."""
        try:
            with self.ledger.watch() as changed:
                while True:
                    changed.clear()
                    try:
                        self._start_ready(changed)
                        await self._settle()
                    except LedgerError as error:
                        log.warning("Judging waits for the ledger: %s", error)
                    with contextlib.suppress(TimeoutError):
                        # Not wait_for, which in Python 3.11 may swallow a cancellation.
                        async with asyncio.timeout(self._pause()):
                            await changed.wait()
        finally:
            await self._stop()

    async def _stop(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _start_ready(self, changed: asyncio.Event) -> None:
        """Take up as many ready turns as there are free workers."""
        now = self._looked = time.monotonic()
        waiting = {turn for turn, trouble in self._troubles.items() if trouble.not_before > now}
        free = self.workers - len(self._running)
        for turn in self.ledger.ready_turns({*self._running, *waiting}, free) if free > 0 else ():
            self._running[turn] = asyncio.create_task(self._judge(turn, changed))

    def _pause(self) -> float:
        """How long nothing needs to be looked at, unless something happens."""
        # Those whose time had come when turns were last looked for are being tried, or wait for a worker, or are gone.
        later = [trouble.not_before for trouble in self._troubles.values() if trouble.not_before > self._looked]
        return min([IDLE_SECONDS, *(max(0.0, moment - time.monotonic()) for moment in later)])

    async def _judge(self, turn: int, done: asyncio.Event) -> None:
        try:
            await self._try(turn)
        finally:
            del self._running[turn]
            done.set()

    async def _try(self, turn: int) -> None:
        """One turn: a verdict, or a reason to try again later."""
        try:
            stored = self.ledger.load_turn(turn)
            await self._store(stored, await self._consider(stored))
            self._troubles.pop(turn, None)
        except UnknownTurn:
            self._troubles.pop(turn, None)  # it was forgotten meanwhile
        except LedgerError as error:
            log.warning("Turn %d is judged again later: %s", turn, error)
            self._later(turn, FIRST_PAUSE)
        except (JudgeError, TimeoutError) as error:
            self.metrics.failures.inc()
            await self._failed(turn, error)
        except Exception:
            # A mistake of ours must not stop the judging of other turns, nor be tried for ever.
            log.exception("Turn %d could not be judged.", turn)
            await self._failed(turn, JudgeError("an error of the program, which its log shows"))

    async def _consider(self, turn: StoredTurn) -> Verdict:
        """What the judges say, and what the teacher says to their hints."""
        verdict = await self.panel.verdict(Case.of(turn), self.signals.questions)
        if not verdict.hints or self.teacher is None:
            return verdict
        return replace(verdict, hints=await self.teacher.consider(turn, verdict.hints))

    async def _store(self, turn: StoredTurn, verdict: Verdict) -> None:
        sample, reason = dispatch(self.signals, verdict)
        if await self.ledger.record_verdict(turn.number, verdict, sample, reason, len(turn.feedback)):
            log.debug("Turn %d: score %s, %s", turn.number, verdict.score, sample or reason)
            self.metrics.count(verdict, Question.SCORE in self.signals.questions, self._saved(verdict))
            self._look_for_collapse()

    def _saved(self, verdict: Verdict) -> int:
        """Answers of a language model that were not needed."""
        if self._llm is None or verdict.source is None:
            return 0
        asked = {vote.question for vote in verdict.votes}
        return self._llm.params.votes * len(self.signals.questions - asked)

    async def _failed(self, turn: int, error: Exception) -> None:
        """Try again later, or abstain if it is the turn that cannot be judged."""
        trouble = self._troubles.setdefault(turn, Trouble(answered=-1))
        answered = self._llm.breaker.answered if self._llm else 0
        away = isinstance(error, JudgeDown | TimeoutError)
        suspect = getattr(error, "suspect", True)
        # While the judge answers nobody, or does not even look at this turn, it says nothing against it.
        if not away or (suspect and answered > trouble.answered):
            trouble.failures += 1
        trouble.answered = answered
        reason = str(error) or "the judge does not answer in time"
        if trouble.failures >= TRIALS:
            await self._give_up(turn, reason)
            return
        pause = max(FIRST_PAUSE * 4 ** (max(1, trouble.failures) - 1), getattr(error, "retry_after", 0.0))
        self._later(turn, pause)
        log.debug("Turn %d is judged again in %.0f s: %s", turn, pause, reason)
        self._tell_if_down()

    def _tell_if_down(self) -> None:
        """Say once that turns wait for their judge, not for each of them."""
        if self.down and self.down != self._told:
            log.warning("Turns wait for their judge: %s", self.down)
        self._told = self.down

    def _later(self, turn: int, pause: float) -> None:
        self._troubles.setdefault(turn, Trouble()).not_before = time.monotonic() + pause

    async def _give_up(self, turn: int, reason: str) -> None:
        verdict = Verdict(reason=f"{TRIALS} trials failed: {reason}")
        try:
            await self._store(self.ledger.load_turn(turn), verdict)
            self._troubles.pop(turn, None)
        except LedgerError:
            self._later(turn, FIRST_PAUSE)

    async def _settle(self) -> None:
        """Look at sessions that have ended as a whole: with scores alone, each gets at least one good turn."""
        for turn in await self.ledger.settle_sessions(self.signals.at_least_one):
            log.info("Turn %d counts as good: it is the best of a session without a good one.", turn)

    def _look_for_collapse(self) -> None:
        trouble = judging_trouble(self.ledger.recent_verdicts(COLLAPSE_WINDOW))
        if trouble and trouble != self._warned:
            log.warning(trouble)
        self._warned = trouble
