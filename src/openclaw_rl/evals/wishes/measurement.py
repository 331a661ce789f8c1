"""Measures one wish on a running server: what a note does, what corrections do, and how soon the wish is kept.

People who have nothing to do with each other are different owners on the server, so none is given what another taught.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.conversation import EvalQuestion, ScriptedUser, cycled, hold
from openclaw_rl.evals.examination import ExamAnswer, examine, is_adherent, is_sensible, marks
from openclaw_rl.evals.wishes.wish import EvalWish
from openclaw_rl.lab.server import RunningServer, is_judging, wait_while
from openclaw_rl.lab.statistics import Interval, proportion_of_trials, sessions_until_adherence
from openclaw_rl.ledger import practices
from openclaw_rl.ledger.errors import CannotPractise
from openclaw_rl.ledger.notes import of_owner
from openclaw_rl.ledger.schema import open_ledger, transaction
from openclaw_rl.types import Practice

#: Of every answer.
TEMPERATURE = 0.7
#: Sessions until three first replies in a row keep the wish, at most.
MAX_SESSIONS = 20
#: The answers that a person corrects. After that, and if they cannot write the wanted answer, people only complain.
CORRECTIONS = 2
#: Sessions in which a person waits for an answer to correct: a model may keep the wish before.
MAX_TEACHING_SESSIONS = 12
#: The people of each wish.
NOTED, SHOWN, CORRECTS, COMPLAINS = PEOPLE = ("noted", "shown", "corrects", "complains")
#: How long to wait until everything is judged.
JUDGE_SECONDS = 60.0
#: Examinations of each wish. The last is only made of a policy that has practised, and without notes and examples.
EXAMS = ("before", "note", "one correction", "two corrections")
PRACTISED = "practised"
#: How long the practice of a wish may take, and how often to look.
PRACTICE_SECONDS, PRACTICE_POLL_SECONDS = 3600.0, 0.5


@dataclass(frozen=True, slots=True)
class WishExam:
    """Answers to held-out questions: those that the wish is for, and others if it has a scope."""

    answers: tuple[ExamAnswer, ...]
    others: tuple[ExamAnswer, ...]

    @property
    def kept(self) -> Interval:
        """The share of answers that keep the wish and are sensible."""
        return proportion_of_trials([marks(self.answers, is_adherent)])

    @property
    def sensible(self) -> Interval:
        """The share of all answers that the quality guard accepts."""
        return proportion_of_trials([marks((*self.answers, *self.others), is_sensible)])

    @property
    def elsewhere(self) -> Interval | None:
        """The share of answers that do what is wished where it is not; None if it is wished everywhere."""
        if not self.others:
            return None
        return proportion_of_trials([marks(self.others, lambda answer: answer.keeps_rules)])


@dataclass(slots=True)
class WishOutcome:
    """What was measured of a wish."""

    wish: EvalWish
    exams: dict[str, WishExam] = field(default_factory=dict)
    """By the names in EXAMS."""
    notes: list[str] = field(default_factory=list)
    """The notes that corrections were given with."""
    note_was_read: bool = False
    """Whether these are what the server read from the complaints. Else the wish's own note was written."""
    corrections: int = 0
    """How many answers were corrected. Fewer than two if the model kept the wish before."""
    first_replies: dict[str, list[bool]] = field(default_factory=dict)
    """By person, whether the first reply of each session kept the wish, until three in a row did."""
    practices: list[Practice] = field(default_factory=list)
    """How its notes were practised, if they were."""

    def sessions(self, person: str) -> int | None:
        """Sessions until three first replies in a row kept the wish; None if that did not happen."""
        return sessions_until_adherence(self.first_replies.get(person, []))


@dataclass(frozen=True, slots=True)
class ExamPlan:
    """How a wish is examined."""

    questions: int
    """Half of them are some that the wish is not for, if it has a scope. Questions may repeat, with another seed."""
    seed: int
    at_once: int

    def inside(self, wish: EvalWish) -> list[EvalQuestion]:
        count = -(-self.questions // 2) if wish.scope else self.questions
        return cycled(wish.questions("held-out", self.seed), 0, count)

    def outside(self, wish: EvalWish) -> list[EvalQuestion]:
        others = wish.other_questions("held-out", self.seed)
        return cycled(others, 0, self.questions // 2) if others else []


class WishMeasurement:
    """Measures a wish. `advance` is called after each examination and each session."""

    def __init__(
        self,
        wish: EvalWish,
        server: RunningServer,
        people: dict[str, Chat],
        plan: ExamPlan,
        advance: Callable[[str], None] = lambda _what: None,
    ) -> None:
        """`people` has the chat of each of PEOPLE, with a key of its own."""
        self.outcome = WishOutcome(wish)
        self.wish, self.server, self.people, self.plan, self.advance = wish, server, people, plan, advance

    async def teach(self) -> None:
        """Examine the model before and after corrections."""
        before, *_ = EXAMS
        await self._examine(before, SHOWN, notes=False)
        await self._examine_corrections()

    def move(self, server: RunningServer, chat: Chat) -> None:
        """Go on with a server that has taken over what was taught."""
        self.server, self.people = server, dict.fromkeys(PEOPLE, chat)

    async def practise(self) -> WishOutcome:
        """Let the policy practise, and examine it without notes and examples."""
        async for found in practised(self.server.run_dir, PRACTICE_SECONDS):
            self.outcome.practices = found
            self.advance(f"{self.wish.name}: practice, {sum(one.made for one in found)} steps")
        await self._examine(PRACTISED, SHOWN, notes=False)
        return self.outcome

    async def run(self) -> WishOutcome:
        """Raises ServerError or ServerFailed, or a group of them."""
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._examine_note())
            parts.create_task(self._examine_corrections())
            parts.create_task(self._hold_sessions(CORRECTS, CORRECTIONS))
            parts.create_task(self._hold_sessions(COMPLAINS, 0))
        return self.outcome

    async def _examine_note(self) -> None:
        """Examine the model without notes, and then with the wish's own."""
        before, noted, *_ = EXAMS
        await self._examine(before, NOTED, notes=False)
        await self.people[NOTED].note(self.wish.note, " ".join(sorted(self.wish.scope)))
        await self._examine(noted, NOTED)

    async def _examine_corrections(self) -> None:
        """Examine the model after one and after two corrections of answers that displeased."""
        chat, (_, _, *left) = self.people[SHOWN], EXAMS
        for number, question in enumerate(taught_questions(self.wish, self.plan.seed)):
            if await self._hold_session(SHOWN, number, question, corrects=True):
                continue
            if not self.outcome.corrections:
                self.outcome.note_was_read = bool(await chat.notes())
                if not self.outcome.note_was_read:
                    await chat.note(self.wish.note, " ".join(sorted(self.wish.scope)))
            self.outcome.corrections += 1
            await self._examine(left.pop(0), SHOWN)
            if not left:
                break
        for name in left:
            await self._examine(name, SHOWN)
        self.outcome.notes = await chat.notes()

    async def _hold_sessions(self, person: str, corrections: int) -> None:
        """Sessions of a person who corrects the first answers that displease, and then only complains."""
        first_replies = self.outcome.first_replies[person] = []
        asked = cycled(self.wish.questions("train", self.plan.seed), 0, MAX_SESSIONS)
        for number, question in enumerate(asked):
            corrects = corrections > 0 and question.text in self.wish.corrections
            passed = await self._hold_session(person, number, question, corrects=corrects)
            first_replies.append(passed)
            corrections -= corrects and not passed
            if sessions_until_adherence(first_replies):
                return

    async def _hold_session(self, person: str, number: int, question: EvalQuestion, *, corrects: bool) -> bool:
        """Ask a question and react to the answer in words; returns whether it pleased.

        The person who `corrects` also says which answer was wanted. Returns when the server has read the reaction.
        """
        chat, persona = self.people[person], self.wish.persona
        seed = 1_000_000 * self.plan.seed + 100 * number
        transcript = await hold(
            chat,
            ScriptedUser(persona, seed),
            [question],
            session=f"{self.wish.name}-{person}-{number}",
            turns=1,
            temperature=TEMPERATURE,
            seed=seed,
        )
        if corrects and not transcript.first_passed:
            await chat.correct(transcript.exchanges[0].answer_id, self.wish.corrections[question.text])
        await wait_while(is_judging, self.server.state, JUDGE_SECONDS)
        self.advance(f"{self.wish.name}: session {number + 1}, {person}")
        return transcript.first_passed

    async def _examine(self, name: str, person: str, *, notes: bool = True) -> None:
        ask = partial(
            examine,
            self.people[person],
            self.wish.persona,
            seed=self.plan.seed,
            notes=notes,
            temperature=TEMPERATURE,
            at_once=self.plan.at_once,
        )
        inside, outside = self.plan.inside(self.wish), self.plan.outside(self.wish)
        self.outcome.exams[name] = WishExam(await ask(inside), await ask(outside))
        self.advance(f"{self.wish.name}: examined, {name}")


def taught_questions(wish: EvalWish, seed: int) -> list[EvalQuestion]:
    """Those that a person asks who waits for an answer to correct."""
    return cycled(wish.questions("train", seed)[: len(wish.corrections)], 0, MAX_TEACHING_SESSIONS)


async def practised(
    run_dir: Path, seconds: float, owners: Collection[str] | None = None
) -> AsyncIterator[list[Practice]]:
    """Ask a server to practise all notes, or those of some people, and tell how far it is until it has ended.

    After `seconds` it is stopped.
    """
    with open_ledger(run_dir) as db:
        with transaction(db):
            notes = [note for note in of_owner(db) if owners is None or note.owner in owners]
            wanted = [practices.request(db, note.number) for note in notes]
        end = time.monotonic() + seconds
        while True:
            found = [practices.load(db, one.number) for one in wanted]
            yield found
            under_way = [one for one in found if one.is_under_way]
            if not under_way:
                return
            if time.monotonic() > end:
                with transaction(db):
                    for one in under_way:
                        # One of them may have ended meanwhile.
                        with contextlib.suppress(CannotPractise):
                            practices.stop(db, one.note)
            await asyncio.sleep(PRACTICE_POLL_SECONDS)
