"""Practises notes while nobody needs the machine, so that the policy keeps to them without being told."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TypeVar

from openclaw_rl.aio import wait_at_most
from openclaw_rl.engines.base import EngineError, Sampler
from openclaw_rl.learn.loop import LearnLoop
from openclaw_rl.learn.plain_answers import practised_prompt
from openclaw_rl.learn.practice_teacher import Keeps, PracticeTeacher
from openclaw_rl.learn.step import Phase
from openclaw_rl.ledger import notes, practices
from openclaw_rl.ledger.errors import CannotPractise, LedgerError, UnknownNote
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.rendering.chat import ChatRenderer
from openclaw_rl.types import ENDED_PRACTICE, Note, Practice, PracticedAnswer, PracticeState, State

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Answers of a step to prompts that the note is not for, or where it is for all, with code.
ANCHORS = 2
#: Answers that are sampled at a time, and after how many too few kept ones end a practice.
SAMPLED_AT_ONCE, SAMPLED_TO_DECIDE = 16, 96
#: The least share of answers that keep to a note for it to be practised. A few are enough: they become examples, with
#: which more answers keep to it.
MIN_KEPT = 0.03
#: A note is learned for good if the policy keeps to it without it in this share of the trial, and nearly as often as
#: the base model does with it.
MIN_HELD, MAX_LOSS = 0.5, 0.15
#: Practice ends early once the policy finds the answers as likely without the note as the base model did with it: their
#: mean log-probs per token differ by at most this much in two steps in a row, after some steps.
MAX_GAP, MIN_STEPS = 0.05, 8
#: It also ends once the policy keeps to the note in this share of its own answers, twice in a row: a further step only
#: takes it farther from the base model. They are tried after each so many steps of imitation.
ENOUGH_HELD, TRIAL_STEPS = 0.9, 4
#: After so many steps of imitation the policy learns from its own answers, if this share of them keeps to the note, and
#: earlier if that one does. Imitation alone goes on until the policy repeats itself: more of its answers keep to the
#: note, and fewer make sense.
IMITATED_STEPS, MIN_OWN_HELD, MOSTLY_HELD = 12, 0.2, 0.5
#: The guard examines a policy that keeps to the note in `MIN_HELD` of its answers, if so many steps were made since it
#: did so last. If the last one is worse, the last good one of these stays. A worse one of these may become good again.
EXAMINED_STEPS = 6
#: Of the messages that a note with a scope is for, what the guard asks too.
GUARDED_PROMPTS = 16
#: How often to look whether people wait, while answers are sampled or trained on.
LOOK_SECONDS = 0.05
#: Steps in a row that the learner may refuse.
MAX_REFUSED = 3


@dataclass(frozen=True, slots=True)
class PracticeSettings:
    """When and how notes are practised."""

    automatic: bool
    """Whether the server begins by itself. Otherwise a note is practised when somebody asks for it."""
    steps: int
    idle_seconds: float
    """How long people must not have used the sampler before the server practises by itself."""
    on_policy: bool
    """Whether the policy's own answers are distilled; otherwise the base model's are imitated."""
    several_users: bool
    """Whether the server has keys for several users."""
    personal: bool
    """Whether the policy that they share is taught what only one of them wishes."""
    seed: int
    poll_seconds: float = 1.0
    resume_seconds: float = 1.0
    """How long they must not have used it before a practice goes on that somebody asked for."""


class Ended(Exception):
    """A practice cannot go on; the message says why."""


class Practiser:
    """Practises one note after the other.

    - Answers are sampled with the least priority. While people use the sampler, none is begun, those under way rest
      where the engine can let them, and so does a step on earlier ones. It is taken back for a step from feedback.
    - The learn loop makes the steps, after those from feedback. Each practised answer is trained on once.
    - The first steps imitate. Then the policy's own answers are scored, where they show whether they keep to the note.
    - Killed in between, it goes on after the next start with the steps that are left.
    - What the model does not keep to with its examples either is not practised; the reason is recorded.
    """

    def __init__(
        self,
        ledger: Ledger,
        loop: LearnLoop,
        sampler: Sampler,
        renderer: ChatRenderer,
        keeps: Keeps,
        settings: PracticeSettings,
        line_of: Callable[[str], Awaitable[tuple[LearnLoop, Sampler]]] | None = None,
    ) -> None:
        """`line_of` names the loop and the sampler of an owner's line, where people have lines of their own."""
        self.line_of = line_of
        self.ledger = ledger
        self.loop = loop
        self.sampler = sampler
        self.renderer = renderer
        self.keeps = keeps
        self.settings = settings
        self._used_at = time.monotonic()
        """When people were seen to use the sampler last."""
        self._patience = settings.idle_seconds
        self._teacher: PracticeTeacher | None = None

    async def run(self) -> None:
        """Practise until cancelled."""
        while True:
            try:
                await self._go_on()
            except (EngineError, LedgerError, OSError) as error:
                log.warning("Practice pauses: %s", error)
                await asyncio.sleep(self.settings.poll_seconds)

    async def _go_on(self) -> None:
        """Practise what is under way or due; otherwise wait a little."""
        current = self.ledger.read(practices.current)
        self._patience = self.settings.idle_seconds
        if current is None and self.settings.automatic and self._is_idle() and self.loop.is_waiting:
            current = await self.ledger.write(practices.add_due, lines=self.line_of is not None)
        if current is None:
            await asyncio.sleep(self.settings.poll_seconds)
            return
        if self.line_of is not None:
            self.loop, self.sampler = await self.line_of(current.owner)
        self.loop.examines_later = True
        try:
            await self._practise(current)
        except (Ended, CannotPractise, UnknownNote) as error:
            log.info("The practice of note %d ends early: %s", current.note, error)
            await self.ledger.write(practices.set_state, current.number, PracticeState.STOPPED, str(error))
        finally:
            self.loop.examines_later = False
            if self.loop.guard is not None:
                self.loop.guard.also = ()
            self._teacher = None

    async def _practise(self, current: Practice) -> None:
        """Make the steps that are left, then try whether the policy keeps to the note."""
        note = self.ledger.read(notes.load, current.note)
        log.info("Note %d is practised: %s", note.number, note.text)
        self._patience = self.settings.resume_seconds if current.by_hand else self.settings.idle_seconds
        current = await self.ledger.write(
            practices.start,
            current.number,
            self.settings.steps,
            personal=self.settings.personal,
            several=self.settings.several_users,
        )
        teacher = await self._begin(current, note)
        refused = close = made = examined = 0
        held: list[float] = []
        while (current := self._as_it_is(current.number, note)).made < current.steps:
            if current.made < made:
                raise Ended("the policy was rolled back meanwhile")
            made = current.made
            batch = await self._own_batch(teacher, note, made, held)
            if len(held) >= 2 and fmean(held[-2:]) >= ENOUGH_HELD:
                break
            if held and held[-1] >= MIN_HELD and made >= examined + EXAMINED_STEPS:
                examined = made
                await self.loop.examine(leaves_worse=False)
            if batch and held[-1] == 1.0:
                # A step needs answers that differ in their scores.
                continue
            if not batch or not held[-1]:
                batch = await self._batch(teacher, note)
            close = close + 1 if gap(batch) <= MAX_GAP else 0
            if made >= MIN_STEPS and close >= 2:
                break
            turns = await self.ledger.write(practices.add_answers, current, batch)
            await self._train(turns)
            refused = 0 if self.ledger.read(practices.load, current.number).made > current.made else refused + 1
            if refused >= MAX_REFUSED:
                raise Ended("the learner refused its steps")
        await self._conclude(teacher, current, note)

    async def _begin(self, current: Practice, note: Note) -> PracticeTeacher:
        """The teacher of a practice, once answers from before a crash are trained on and the guard knows the start."""
        while left := self.ledger.read(practices.to_train, self.loop.line.takes):
            await self._train(left)
        if self.loop.guard is not None and not self.loop.guard.begin(self.loop.version):
            await self.loop.examine()
        seed = self.settings.seed + current.number
        teacher = PracticeTeacher(self.ledger, self.sampler, self.renderer, note, self.keeps, self._when_idle, seed)
        self._teacher = teacher
        teacher.kept += self.ledger.read(practices.answers, current.number)
        await teacher.prepare()
        if self.loop.guard is not None and note.scope:
            # Of what the note is for, plain prompts ask little.
            fitting = [*teacher.prompts.trial, *teacher.prompts.practised][:GUARDED_PROMPTS]
            self.loop.guard.also = [practised_prompt(one.text, note.owner) for one in fitting]
        return teacher

    def _as_it_is(self, number: int, note: Note) -> Practice:
        """The practice now. Raises Ended if its owner stopped it, or removed or changed its note."""
        current = self.ledger.read(practices.load, number)
        if current.state in ENDED_PRACTICE:
            raise Ended(current.reason)
        try:
            changed = self.ledger.read(notes.load, note.number).text != note.text
        except UnknownNote:
            raise Ended("its note was removed") from None
        if changed:
            raise Ended("its note was changed")
        return current

    async def _batch(self, teacher: PracticeTeacher, note: Note) -> list[PracticedAnswer]:
        """The answers of a step. Raises Ended if the model does not keep to the note."""
        anchors = await teacher.anchors(ANCHORS)
        if self.settings.on_policy:
            return [*anchors, *await teacher.distilled_answers(practices.BATCH)]
        while teacher.ready < practices.BATCH:
            await teacher.sample(SAMPLED_AT_ONCE)
            found, asked = teacher.accepted, teacher.sampled
            if asked >= SAMPLED_TO_DECIDE and found < MIN_KEPT * asked:
                raise Ended(f"this model keeps to it in {found} of {asked} answers; a larger model may")
        return [*anchors, *await teacher.take(practices.BATCH)]

    async def _own_batch(
        self, teacher: PracticeTeacher, note: Note, made: int, held: list[float]
    ) -> list[PracticedAnswer]:
        """The policy's own answers, scored; none if it is to imitate. `held` gets the share that keeps to the note."""
        imitates = self.settings.on_policy or not knows_enough(made, held)
        if imitates and made >= MIN_STEPS and not made % TRIAL_STEPS:
            kept, tried = await teacher.try_policy()
            held += [kept / tried] if tried else []
        if self.settings.on_policy or not knows_enough(made, held):
            return []
        anchors = await teacher.anchors(ANCHORS)
        answers = await teacher.scored_answers(practices.OWN_BATCH - len(anchors))
        if not answers:
            held.clear()
            return []
        kept = sum(one.score == 1.0 for one in answers)
        held.append(kept / len(answers))
        log.info("Note %d: after %d steps %d of %d own answers keep to it.", note.number, made, kept, len(answers))
        return [*anchors, *answers]

    async def _train(self, turns: list[int]) -> None:
        """Wait until the learn loop has trained on these answers, or has dropped them."""
        self.loop.may_practise = self._is_idle
        with self.ledger.watch() as changed, self._unpaused():
            while any(state in (State.JUDGED, State.BATCHED) for state in self.ledger.read(practices.states, turns)):
                if self.loop.step >= self.loop.settings.max_steps:
                    raise Ended(f"--max-steps {self.loop.settings.max_steps} have been made")
                changed.clear()
                await wait_at_most(LOOK_SECONDS, changed.wait())
                self.loop.pause_practice(paused=not self._is_idle())

    @contextlib.contextmanager
    def _unpaused(self) -> Iterator[None]:
        """The step goes on after this block, however it ends."""
        try:
            yield
        finally:
            self.loop.pause_practice(paused=False)

    async def _conclude(self, teacher: PracticeTeacher, current: Practice, note: Note) -> None:
        """Try the policy without the note. Retire the note if it keeps to it.

        If it hardly ever does, or makes less sense, the last good policy serves again.
        """
        held, tried, reason = await tried_policy(teacher)
        begun = self.ledger.read(practices.begun_from, current.number, self.loop.version)
        went_back = False
        if begun is not None and held < MIN_OWN_HELD * tried:
            went_back = await self.loop.take_back(begun, reason)
            if went_back and not self.ledger.read(practices.load, current.number).made:
                raise Ended(f"{reason}, so the policy before serves again")
        if went_back or not await self._is_good(current.number):
            held, tried, reason = await tried_policy(teacher)
        current = self._as_it_is(current.number, note)
        kept = teacher.accepted / teacher.sampled if teacher.sampled else MIN_HELD
        if not tried:
            state, reason = PracticeState.DONE, "your next conversations show whether the policy keeps to it"
        else:
            # Nothing examines a line that the learner has put away for another.
            is_examined = self.loop.phase is not Phase.UNPREPARED
            is_learned = is_examined and held / tried >= max(MIN_HELD, kept - MAX_LOSS)
            state = PracticeState.LEARNED if is_learned else PracticeState.DONE
        log.info("Note %d has been practised in %d steps: %s.", current.note, current.made, reason)
        await self.ledger.write(practices.set_state, current.number, state, reason)

    async def _is_good(self, number: int) -> bool:
        """Whether the guard finds the policy no worse. Otherwise one from an earlier step of the practice serves.

        Raises Ended if the policy from before the practice serves.
        """
        if await self.loop.examine():
            return True
        if not self.ledger.read(practices.load, number).made:
            why = self.loop.guard.state.cautious if self.loop.guard else ""
            raise Ended(f"the policy became worse, so the one before serves again ({why})")
        return False

    async def _when_idle(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do a short piece of work that begins while nobody uses the sampler. If somebody comes, the sampler lets it
        rest, or ends it soon."""
        while not (self._is_idle() and self.loop.is_waiting):
            await asyncio.sleep(LOOK_SECONDS)
        return await work()

    def _is_idle(self) -> bool:
        """Whether people have not used the sampler for a while."""
        stats = self.sampler.stats()
        own = self._teacher.open_requests if self._teacher else 0
        now = time.monotonic()
        if stats.active + stats.waiting > own:
            self._used_at = now
            return False
        return now - self._used_at >= self._patience


async def tried_policy(teacher: PracticeTeacher) -> tuple[int, int, str]:
    """How many answers of the policy without the note keep to it, of how many, and the same in words."""
    held, tried = await teacher.try_policy()
    return held, tried, f"without the note, {held} of {tried} answers to other questions keep to it"


def gap(answers: Sequence[PracticedAnswer]) -> float:
    """How much likelier a token of these answers is for the base model with the note than for the policy without it."""
    gaps = [
        (fmean(one.teacher_logprobs) if one.teacher_logprobs else one.taught_logprob) - fmean(one.logprobs)
        for one in answers
        if not one.is_anchor and one.score is None
    ]
    return fmean(gaps) if gaps else math.inf


def knows_enough(made: int, held: Sequence[float]) -> bool:
    """Whether a policy can learn from its own answers: enough of them keep to the note."""
    share = held[-1] if held else 0.0
    return (made >= IMITATED_STEPS and share >= MIN_OWN_HELD) or (made >= MIN_STEPS and share >= MOSTLY_HELD)
