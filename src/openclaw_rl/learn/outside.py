"""Learning by an outside trainer: it claims judged turns over HTTP, trains, and confirms them."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from openclaw_rl.aio import wait_at_most
from openclaw_rl.learn.samples import load_with_signal
from openclaw_rl.ledger import leases
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.groups import trainable
from openclaw_rl.ledger.status import OUTSIDE
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.training import weights_label
from openclaw_rl.methods.base import Baseline, Lesson, Method, NoSignal, forced_tokens, is_hinted, teacher_logprobs
from openclaw_rl.types import Claim, LeaseEnd, NextStep, OutsideSample, StoredTurn

log = logging.getLogger(__name__)

#: How often leases are looked at that may have run out.
SWEEP_SECONDS = 5.0
CLAIM, CONFIRM = "POST /v1/training/claim", "POST /v1/training/confirm"


class OutsideWeights(Protocol):
    """The versions of the weights that the trainer pushes into the inference servers."""

    @property
    def newest_version(self) -> int: ...

    def reserve(self) -> int:
        """A number for weights that no server has shown yet."""

    async def look(self) -> int:
        """The version that the servers hold now."""


@dataclass(frozen=True, slots=True)
class OutsideSettings:
    """When turns are handed out, and for how long."""

    trainer: str
    batch_size: int
    max_steps: int
    max_staleness: int
    lease_seconds: float


class NothingToClaim(Exception):
    """No turns will be handed out; the message says why."""


class OutsideTraining:
    """Hands judged turns to an outside trainer, and records what it confirms.

    - Each turn is trained on once, as far as the trainer confirms what it has used and only that.
    - A claim gets at least as many turns as it asks for, or none. Turns without a signal are dropped with the reason.
    - A lease ends when it is confirmed or runs out, also if either side is killed meanwhile.
    - `status` says what a step waits for.
    """

    def __init__(self, ledger: Ledger, method: Method, settings: OutsideSettings, weights: OutsideWeights) -> None:
        self.ledger = ledger
        self.method = method
        self.settings = settings
        self.weights = weights
        self._asked: float | None = None
        """When the trainer last asked for turns."""
        self._confirming = asyncio.Lock()
        self._last_version = weights.newest_version
        """Of the last step, or of the weights at the start."""

    async def run(self) -> None:
        """Give back what was not confirmed in time, until cancelled."""
        while True:
            try:
                ended = await self._expire()
            except LedgerError as error:
                log.debug("Leases wait for the ledger: %s", error)
            else:
                if ended:
                    log.warning("%d leases ran out without being confirmed. Their turns are handed out again.", ended)
            await asyncio.sleep(SWEEP_SECONDS)

    async def _expire(self) -> int:
        """End the leases that have run out; how many there were. Nothing is written if there are none."""
        return await self.ledger.write(leases.expire) if self.ledger.read(leases.any_expired) else 0

    async def claim(
        self, count: int | None, seconds: float | None, patience: float, is_gone: Callable[[], Awaitable[bool]]
    ) -> Claim:
        """Lease at least `count` turns, waiting up to `patience` seconds for them. Raises NothingToClaim.

        A trainer that `is_gone` when there are enough gets none: they would be held until the lease runs out.
        """
        count = self.settings.batch_size if count is None else count
        end = time.monotonic() + patience
        with self.ledger.watch() as changed:
            while True:
                changed.clear()
                self._asked = time.monotonic()
                step = self.ledger.read(leases.last_step)
                if step >= self.settings.max_steps:
                    raise NothingToClaim(f"--max-steps {self.settings.max_steps} have been made.")
                await self._expire()
                gone = await is_gone()
                enough = not gone and self.ledger.read(trainable) >= count
                if enough and (claim := await self._claim(count, step + 1, seconds)):
                    return claim
                left = end - time.monotonic()
                if gone or left <= 0:
                    return Claim(None, step + 1, (), f"{self.ledger.read(trainable)} of {count} judged turns are there")
                # Leases that run out are no change of the ledger until somebody looks.
                await wait_at_most(min(left, SWEEP_SECONDS), changed.wait())

    async def _claim(self, count: int, step: int, seconds: float | None) -> Claim | None:
        """Lease turns and make samples of them; None if too few of them have a signal."""
        seconds = self.settings.lease_seconds if seconds is None else seconds
        lease = await self.ledger.write(leases.claim, count, self.settings.max_staleness, seconds)
        if lease is None:
            return None
        turns = await load_with_signal(self.ledger, self.method, lease.turns, check_sampled_only)
        if len(turns) < count:
            await self.ledger.write(leases.release, lease.id)
            return None
        groups = await asyncio.to_thread(self._samples, turns)
        return Claim(replace(lease, turns=tuple(turn.number for turn in turns)), step, groups, "")

    async def confirm(self, lease: str) -> int:
        """Record that a lease's turns were trained on; the step. Raises UnknownLease and LeaseRefused."""
        async with self._confirming:
            served = await self.weights.look()
            # A step needs a version of its own, also if the trainer has not pushed its weights yet.
            version = served if served > self._last_version else self.weights.reserve()
            before = self.ledger.read(leases.last_step)
            step = await self.ledger.write(leases.confirm, lease, version, self._last_version)
            if step > before:
                self._last_version = version
                log.info("The outside trainer confirmed step %d; the servers hold policy %d.", step, served)
            return step

    def progress(self) -> NextStep | None:
        """How many turns the next step has; None after the last step."""
        settings = self.settings
        step = self.ledger.read(leases.last_step)
        if step >= settings.max_steps:
            return None
        leased = sum(len(lease.turns) for lease in self.ledger.read(leases.open_leases))
        if leased:
            return NextStep(step + 1, leased, settings.batch_size, training=True)
        return NextStep(step + 1, self.ledger.read(trainable), settings.batch_size)

    def status(self) -> str:
        """What the next step waits for, in words."""
        settings = self.settings
        if self.ledger.read(leases.last_step) >= settings.max_steps:
            return f"done: --max-steps {settings.max_steps} have been made"
        claimed = self.ledger.read(leases.open_leases)
        if claimed:
            turns = sum(len(lease.turns) for lease in claimed)
            now = time.time()
            return (
                f"{OUTSIDE}{settings.trainer} claimed {turns} turns {now - claimed[0].created:.0f} s ago, and has "
                f"{max(0.0, claimed[0].expires - now):.0f} s left to confirm them ({CONFIRM})"
            )
        ran_out = self.ledger.read(leases.last_end) is LeaseEnd.RAN_OUT
        lost = "; its last claim ran out without being confirmed" if ran_out else ""
        asked = "it has not asked since this server was started"
        if self._asked is not None:
            asked = f"it last asked {time.monotonic() - self._asked:.0f} s ago"
        return (
            f"{OUTSIDE}{self.ledger.read(trainable)} judged turns wait for {settings.trainer} to claim them ({CLAIM}); "
            f"{asked}{lost}"
        )

    def _samples(self, turns: Sequence[StoredTurn]) -> list[list[OutsideSample]]:
        """Samples by group, in the order of their first turns."""
        baseline = self.method.baseline(turns)
        groups: dict[tuple[str, str] | int, list[OutsideSample]] = {}
        for turn in turns:
            group = turn.episode.group if turn.episode else None
            key = turn.number if group is None else (turn.session.owner, group)
            groups.setdefault(key, []).append(self._sample(turn, group, baseline))
        return list(groups.values())

    def _sample(self, turn: StoredTurn, group: str | None, baseline: Baseline) -> OutsideSample:
        verdict = turn.verdict
        advantages = self.method.lesson(turn, baseline).advantages
        free = {x for x, forced in zip(advantages, forced_tokens(turn), strict=True) if not forced}
        return OutsideSample(
            turn=turn.number,
            session=turn.session.id,
            group=group,
            messages=turn.messages,
            message=turn.message,
            prompt_ids=turn.prompt_ids,
            response_ids=turn.response_ids,
            loss_mask=[0 if forced else 1 for forced in forced_tokens(turn)],
            rollout_log_probs=turn.logprobs,
            teacher_log_probs=teacher_logprobs(turn) if is_hinted(turn) else None,
            advantages=advantages,
            reward=free.pop() if len(free) == 1 else self.method.reward(turn, baseline),
            score=verdict.score if verdict else None,
            policy_version=turn.version,
            weight_version=self.ledger.read(weights_label, turn.version),
            finish_reason=turn.finish_reason,
        )


def check_sampled_only(lesson: Lesson) -> None:
    """Raise NoSignal for a lesson that an outside trainer cannot use."""
    if lesson.alternatives is not None:
        raise NoSignal("it teaches tokens that were not sampled, which an outside trainer cannot use")
