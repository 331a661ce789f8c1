"""A trial of one method, persona and seed: conversations with a real server, and examinations as its policy changes."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from openclaw_rl.dashboard.evaluations import Evaluation, record_evaluations
from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.conversation import (
    EvalQuestion,
    ModelUser,
    ScriptedUser,
    Transcript,
    User,
    cycled,
    hold,
    questions,
)
from openclaw_rl.evals.examination import ExamAnswer, examine
from openclaw_rl.evals.personas.persona import Persona
from openclaw_rl.evals.wishes.measurement import CORRECTIONS, practised, taught_questions
from openclaw_rl.evals.wishes.wish import EvalWish
from openclaw_rl.lab.commands import waiting_turns
from openclaw_rl.lab.server import RunningServer, run_server, wait_while
from openclaw_rl.methods.registry import find_method

#: Simulated people who talk at the same time, after the first sessions: these come one after another, as one person's
#: do, so that each begins after the server has read what was said in those before.
PEOPLE = 4
SESSIONS_OF_ONE = 4
#: Answers per session.
TURNS = 2
#: Questions in an examination during the trial, and in the first and last one. Questions may repeat, with another seed.
SHORT_EXAM, LONG_EXAM = 16, 40
#: How often to check for a new policy.
POLL_SECONDS = 0.5
#: How long to wait for the last training steps when the people have gone.
MAX_SETTLE_SECONDS = 180.0
#: With more turns to judge than this, no session begins: the judge has read what a person said before they come back.
MOST_UNJUDGED = PEOPLE
#: How long the first sessions wait until everything is judged.
JUDGE_SECONDS = 30.0
#: What a trial of a wish is called in place of its method.
PRACTICE = "practice"


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """The settings of a trial."""

    method: str
    persona: Persona
    seed: int
    run_dir: Path
    sessions: int
    """At most."""
    minutes: float
    """At most, counted from the first conversation."""
    flags: tuple[str, ...] = ()
    """Further options for the server."""
    exam_every: int = 4
    """The number of policy versions between two examinations."""
    user_url: str = ""
    """The OpenAI-compatible address of a model that plays the person."""
    user_model: str = ""
    user_key: str = ""
    wish: EvalWish | None = None
    """The persona's, if it has one. Then the person corrects two answers, and the model practises."""

    @property
    def label(self) -> str:
        """The method's name; of one's own method in a file, without folders."""
        return PRACTICE if self.wish else Path(self.method).name

    @property
    def uses_notes(self) -> bool:
        """Whether the model is given notes of what the person asked for."""
        return find_method(self.method).distils_notes


@dataclass(frozen=True, slots=True)
class Exam:
    """The examination of one policy version."""

    version: int
    seconds: float
    """Since the first conversation."""
    sessions: int
    """The number of sessions before it."""
    answers: tuple[ExamAnswer, ...]

    @property
    def adherence(self) -> float:
        return sum(answer.passed for answer in self.answers) / len(self.answers)

    @property
    def quality(self) -> float:
        """The share of answers that pass the quality guard."""
        return sum(not answer.faults for answer in self.answers) / len(self.answers)


@dataclass(frozen=True, slots=True)
class HeldSession:
    """A session that was held."""

    number: int
    seconds: float
    conversation: Transcript


@dataclass(slots=True)
class TrialOutcome:
    """Everything that happened in a trial."""

    plan: TrialPlan
    exams: list[Exam] = field(default_factory=list)
    sessions: list[HeldSession] = field(default_factory=list)
    """In the order in which they ended; sorted by their number when the trial is over."""
    noted: Exam | None = None
    """The last policy with the person's notes in its prompt, if the method uses notes."""
    left: str = ""
    """That turns wait, if no step was made at all or the last one not in time; else empty."""
    practice: str = ""
    """How practice ended, if there was one."""
    is_complete: bool = False
    """Whether the trial came to its end; one that was stopped has what was measured until then."""

    @property
    def first_replies(self) -> list[bool]:
        return [held.conversation.first_passed for held in self.sessions]


class TrialWatcher(Protocol):
    """Receives the events of a trial."""

    def starting(self, plan: TrialPlan) -> None: ...
    def started(self, plan: TrialPlan) -> None: ...
    def talking(self, outcome: TrialOutcome, seconds: float, state: str) -> None: ...
    def examining(self, outcome: TrialOutcome, seconds: float, done: int, total: int) -> None: ...
    def examined(self, outcome: TrialOutcome, exam: Exam) -> None: ...


async def run(outcome: TrialOutcome, watch: TrialWatcher) -> None:
    """Run a trial on a server of its own; what happens is added to its outcome at once.

    Raises ServerFailed, ServerError, or a group of them.
    """
    plan = outcome.plan
    watch.starting(plan)
    # A method that does not learn from notes is measured without them.
    notes = () if plan.uses_notes else ("--no-notes",)
    flags = ("--method", plan.method, "--seed", str(plan.seed), *notes, *plan.flags)
    async with contextlib.AsyncExitStack() as stack:
        player = None
        if plan.user_url:
            other = Chat(plan.user_url, model=plan.user_model, key=plan.user_key)
            player = await stack.enter_async_context(other)
        server = await stack.enter_async_context(run_server(plan.run_dir, *flags))
        watch.started(plan)
        chat = await stack.enter_async_context(Chat(server.url))
        await Trial(outcome, server, chat, watch, player).run()


class Trial:
    """A running trial."""

    def __init__(
        self, outcome: TrialOutcome, server: RunningServer, chat: Chat, watch: TrialWatcher, player: Chat | None = None
    ) -> None:
        """`player` is a model that plays the people; without it they follow a script."""
        self.poll_seconds = POLL_SECONDS
        self.settle_seconds = MAX_SETTLE_SECONDS
        self.outcome, self.server, self.chat, self.watch, self.player = outcome, server, chat, watch, player
        self.plan = outcome.plan
        self._numbers = count()
        self._began = 0.0
        #: Cleared during an examination or a training step, so that no session begins: it would compete for a small
        #: machine, and use a policy that is about to be replaced.
        self._open = asyncio.Event()
        #: Set when the first sessions are over.
        self._joined = asyncio.Event()

    async def run(self) -> None:
        try:
            await self._run()
            self.outcome.is_complete = True
        finally:
            self.outcome.sessions.sort(key=lambda held: held.number)

    async def _run(self) -> None:
        plan = self.plan
        if plan.wish:
            held_out = plan.wish.questions("held-out", plan.seed)
        else:
            held_out = questions(plan.persona.name, "held-out", plan.seed)
        asked = cycled(held_out, 0, LONG_EXAM)
        await self._examine(0, asked)
        self._began = time.monotonic()
        if plan.wish:
            await self._teach(plan.wish)
            await self._note_exam(0, asked)
            await self._practise(cycled(held_out, 0, SHORT_EXAM))
        else:
            await self._converse(held_out)
        last = await self._last_version()
        await self._examine(last, asked)
        if plan.uses_notes and not plan.wish:
            await self._note_exam(last, asked)

    async def _note_exam(self, version: int, asked: Sequence[EvalQuestion]) -> None:
        """Examine a policy with the person's notes."""
        self.outcome.noted = await self._exam(version, asked, notes=True)
        self._record(self.outcome.noted, f"{self.plan.persona.name}, with notes")

    async def _converse(self, held_out: Sequence[EvalQuestion]) -> None:
        """Let people talk, and examine as the policy changes."""
        self._open.set()
        # If one task fails, the group cancels the others and raises the error.
        async with asyncio.TaskGroup() as tasks:
            polling = tasks.create_task(self._poll(cycled(held_out, 0, SHORT_EXAM)))
            async with asyncio.TaskGroup() as people:
                people.create_task(self._talk())
                for _ in range(PEOPLE - 1):
                    people.create_task(self._join())
            polling.cancel()

    async def _teach(self, wish: EvalWish) -> None:
        """Let the person ask, and write the answers that they wanted in place of the first that displease."""
        corrected = 0
        for number, question in enumerate(taught_questions(wish, self.plan.seed)):
            conversation = await self._hold(number, [question], turns=1)
            if not conversation.first_passed:
                await self.chat.correct(conversation.exchanges[0].answer_id, wish.corrections[question.text])
                corrected += 1
            await self._judge_catches_up()
            self.watch.talking(self.outcome, self.seconds, f"{corrected} answers were corrected")
            if corrected == CORRECTIONS:
                break
        if not await self.chat.notes():
            await self.chat.note(wish.note, " ".join(sorted(wish.scope)))

    async def _practise(self, held_out: Sequence[EvalQuestion]) -> None:
        """Let the model practise what was wished until it ends or the time is up, and examine it meanwhile."""
        examined = 0
        async for practices in practised(self.plan.run_dir, 60 * self.plan.minutes - self.seconds):
            made = sum(one.made for one in practices)
            self.outcome.practice = "; ".join(f"note {one.note} {one.words}" for one in practices)
            self.watch.talking(self.outcome, self.seconds, self.outcome.practice)
            if made >= examined + self.plan.exam_every:
                examined = made
                await self._examine(made, held_out)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began if self._began else 0.0

    async def _last_version(self) -> int:
        """The policy after the last step that the server makes of what was said. It has `settle_seconds` for it."""
        state = await wait_while(is_learning, self.server.state, self.settle_seconds, self._show, self.poll_seconds)
        version, upcoming = int(state["policy_version"]), state["next_step"] or {}
        if is_learning(state) or not version:
            self.outcome.left = waiting_turns(upcoming.get("samples", 0), upcoming.get("needed", 0))
        return version

    def _show(self, state: Mapping[str, Any]) -> None:
        self.watch.talking(self.outcome, self.seconds, str(state.get("learner", "")))

    async def _join(self) -> None:
        """One of the people who talk after the first sessions."""
        await self._joined.wait()
        await self._talk()

    async def _talk(self) -> None:
        """One person: session after session, until the sessions or the time run out."""
        plan = self.plan
        while True:
            await self._open.wait()
            await self._judge_catches_up()
            number = next(self._numbers)
            over = number >= plan.sessions or self._is_late()
            if over or number >= SESSIONS_OF_ONE:
                self._joined.set()
            if over:
                return
            await self._hold(number, self._questions(number), TURNS)

    async def _hold(self, number: int, asked: Sequence[EvalQuestion], turns: int) -> Transcript:
        plan = self.plan
        seed = 1_000_000 * plan.seed + 100 * number
        conversation = await hold(
            self.chat,
            self._user(seed),
            asked,
            session=f"{plan.label}-{plan.seed}-{number}",
            turns=turns,
            seed=seed,
        )
        self.outcome.sessions.append(HeldSession(number, self.seconds, conversation))
        return conversation

    async def _judge_catches_up(self) -> None:
        began = time.monotonic()

        def lags(state: Mapping[str, Any]) -> bool:
            waited = time.monotonic() - began >= JUDGE_SECONDS
            most = MOST_UNJUDGED if waited or self._joined.is_set() else 0
            return not self._is_late() and (state.get("queue") or {}).get("to_judge", 0) > most

        await wait_while(lags, self.server.state, 60 * self.plan.minutes, poll_seconds=self.poll_seconds)

    def _is_late(self) -> bool:
        return self.seconds >= 60 * self.plan.minutes

    def _user(self, seed: int) -> User:
        persona = self.plan.persona
        return ModelUser(persona, self.player, seed) if self.player else ScriptedUser(persona, seed)

    def _questions(self, number: int) -> list[EvalQuestion]:
        return cycled(questions(self.plan.persona.name, "train", self.plan.seed), number * TURNS, TURNS)

    async def _poll(self, held_out: Sequence[EvalQuestion]) -> None:
        """Examine every few policy versions, and hold sessions back during training, until cancelled."""
        examined = 0
        while True:
            await asyncio.sleep(self.poll_seconds)
            state = await self.server.state()
            self._show(state)
            version = int(state["policy_version"])
            if version >= examined + self.plan.exam_every:
                examined = version
                self._open.clear()
                await self._examine(version, held_out)
            upcoming = state["next_step"]
            # When the time is up, waiting people must be released, even if the step never comes.
            if upcoming and upcoming["samples"] >= upcoming["needed"] and not self._is_late():
                self._open.clear()
            else:
                self._open.set()

    async def _examine(self, version: int, held_out: Sequence[EvalQuestion]) -> None:
        """Examine the policy without notes."""
        exam = await self._exam(version, held_out)
        self.outcome.exams.append(exam)
        self._record(exam, self.plan.persona.name)
        self.watch.examined(self.outcome, exam)

    def _record(self, exam: Exam, what: str) -> None:
        """Add an examination to the run, whose page shows it. It may be missing: the demo's files have it too."""
        passed = sum(answer.passed for answer in exam.answers)
        with contextlib.suppress(OSError):
            record_evaluations(self.plan.run_dir, [Evaluation(exam.version, what, passed, len(exam.answers))])

    async def _exam(self, version: int, held_out: Sequence[EvalQuestion], *, notes: bool = False) -> Exam:
        done = count()
        seconds, sessions = self.seconds, len(self.outcome.sessions)

        def report(_: ExamAnswer | None = None) -> None:
            self.watch.examining(self.outcome, self.seconds, next(done), len(held_out))

        report()
        answers = await examine(
            self.chat,
            self.plan.persona,
            held_out,
            seed=self.plan.seed,
            on_answer=report,
            notes=notes,
        )
        return Exam(version, seconds, sessions, answers)


def is_learning(state: Mapping[str, Any]) -> bool:
    """Whether a server still judges, or has what a training step needs."""
    queue, upcoming = state.get("queue") or {}, state.get("next_step")
    if not upcoming:
        return False
    return bool(queue.get("to_judge") or upcoming.get("training") or upcoming["samples"] >= upcoming["needed"])
