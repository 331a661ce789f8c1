"""What is measured: eight tracks, each of items that are scored alone.

An item talks to a `Venue` and returns marks: whether each of its cases passed. The score is the share that did. Every
track is made so that an endpoint that always keeps what was asked for scores 1, and one that answers nothing scores 0.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from random import Random
from typing import Any

from openclaw_rl.aio import run_concurrently
from openclaw_rl.client import ServerError
from openclaw_rl.envs.base import Message, Task
from openclaw_rl.envs.toolcall.environment import ToolCallEnvironment
from openclaw_rl.evals import eval_tasks, tool_use
from openclaw_rl.evals.benchmark.person import Held, OrdinaryChat, Teaching, questioned
from openclaw_rl.evals.benchmark.systems import NotOffered, Venue
from openclaw_rl.evals.chat import Reply
from openclaw_rl.evals.conversation import EvalQuestion, cycled, questions
from openclaw_rl.evals.examination import ExamAnswer
from openclaw_rl.evals.personas.persona import load
from openclaw_rl.evals.scores import EvalPlan
from openclaw_rl.evals.wishes.drawn import PLACES, DrawnWish, draw
from openclaw_rl.evals.wishes.measurement import ExamPlan
from openclaw_rl.evals.wishes.wish import EvalWish, built_in
from openclaw_rl.lab.statistics import RUN, sessions_until_adherence
from openclaw_rl.lab.tasks import HELD_OUT, TRAIN

#: Whether each case passed, by its name.
MarkList = list[tuple[str, bool]]
#: The people of the published protocol.
PEOPLE = ("student", "teaching-assistant", "teacher")
TOGETHER = "together"
MAX_TOOL_TOKENS = 96
TOOL_TURNS = 4
TOOLS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Size:
    """How much is asked."""

    public: int
    """Wishes of the suite, and as many drawn ones as `drawn` says."""
    drawn: int
    questions: int
    sessions: int
    most_sessions: int
    """Of each person of the published protocol."""
    many: int
    cases: int
    """Of coding and of tool use."""
    rounds: int
    tasks: int
    """Of tool calls, in each round and each examination."""
    alone: Sequence[str] = PEOPLE
    """The people who also come alone."""
    turns: int = 2
    """Answers in a session of these people."""
    longest: int = 512
    """The most tokens of an answer, whatever else is asked for."""
    quiet_seconds: float = 900.0
    """How long nobody talks to an endpoint that learns on its own meanwhile."""


FULL = Size(public=5, drawn=5, questions=16, sessions=8, most_sessions=12, many=10, cases=12, rounds=3, tasks=16)
QUICK = Size(
    public=1,
    drawn=1,
    questions=4,
    sessions=4,
    most_sessions=4,
    many=3,
    cases=2,
    rounds=1,
    tasks=3,
    alone=PEOPLE[:1],
    turns=1,
    longest=64,
    quiet_seconds=30.0,
)


@dataclass(slots=True)
class Scored:
    """What an item has shown."""

    marks: MarkList
    parts: dict[str, MarkList] = field(default_factory=dict)
    held: Held | None = None
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TrackItem:
    """Something that is scored alone. `people` are those that it needs, who have nothing to do with each other."""

    track: str
    name: str
    run: Callable[[Venue], Awaitable[Scored]]
    people: int = 1

    @property
    def key(self) -> tuple[str, str]:
        return self.track, self.name


def held_out(seed: int, count: int) -> list[EvalQuestion]:
    return cycled(questions(split="held-out", seed=seed), 0, count)


def marks_of(answers: Sequence[ExamAnswer], *, kept: bool = True) -> MarkList:
    """Whether each answer is sensible and keeps the wish; with `kept` false, whether it is sensible and does not."""
    return [(one.question.text, one.keeps_rules is kept and not one.faults) for one in answers]


async def teach(venue: Venue, lesson: Teaching, asked: Sequence[EvalQuestion], turns: int = 1) -> None:
    """Hold a session for each question, or for each `turns` of them, and let the endpoint read each."""
    for place in range(0, len(asked), turns):
        await lesson.session(asked[place : place + turns], turns)
        await venue.settle()


# Wishes


def wish_items(size: Size, seed: int) -> list[TrackItem]:
    dice = Random(f"benchmark wishes {seed}")
    public = dice.sample(sorted(built_in()), size.public)
    chosen = [built_in()[name] for name in public]
    places = dice.sample(sorted(PLACES), len(PLACES))
    chosen += [draw(dice, [places[number % len(places)]]).wish for number in range(size.drawn)]
    return [TrackItem("wishes", wish.name, partial(keeps_wish, wish, size, seed)) for wish in chosen]


async def keeps_wish(wish: EvalWish, size: Size, seed: int, venue: Venue) -> Scored:
    """Examine, hold sessions, examine again: also without what the endpoint remembers, if it offers that."""
    (chat,) = venue.people
    lesson = Teaching.of(chat, wish, seed, **venue.teaching)
    before, prompts = await examined(wish, size, seed, lesson)
    await teach(venue, lesson, cycled(wish.questions("train", seed), 0, size.sessions))
    await venue.learn(size.quiet_seconds)
    after, longer = await examined(wish, size, seed, lesson)
    carried = [longer[text] - prompts[text] for text in prompts if text in longer]
    parts = {"before": before, "from the second session": numbered(lesson.first_replies)[1:]}
    if venue.bare_headers:
        parts["unaided"] = (await examined(wish, size, seed, lesson, venue.bare_headers))[0]
    elif carried and not any(carried):
        # The prompts were as long as before anything was said, so they carried nothing of it.
        parts["unaided"] = after
    mean = round(sum(carried) / len(carried), 1) if carried else None
    return Scored(after, parts, lesson.held, {"group": wish.group, "carried_tokens": mean})


async def examined(
    wish: EvalWish, size: Size, seed: int, lesson: Teaching, headers: Mapping[str, str] | None = None
) -> tuple[MarkList, dict[str, int]]:
    """The marks, and the tokens of each question's prompt as the endpoint counts them."""
    chat, plan = lesson.chat, ExamPlan(size.questions, seed, 1)
    begun = len(chat.log)
    inside = await questioned(chat, wish.persona, plan.inside(wish), seed, headers)
    outside = await questioned(chat, wish.persona, plan.outside(wish), seed, headers)
    prompts = {} if chat.cost.estimated else {one["said"]: one["tokens"][0] for one in chat.log[begun:]}
    return marks_of(inside) + marks_of(outside, kept=False), prompts


def numbered(passes: Sequence[bool]) -> MarkList:
    return [(f"session {number}", passed) for number, passed in enumerate(passes, 1)]


# People


def people_items(size: Size, seed: int) -> list[TrackItem]:
    alone = [TrackItem("people", name, partial(satisfies, (name,), size, seed)) for name in size.alone]
    return [*alone, TrackItem("people", TOGETHER, partial(satisfies, PEOPLE, size, seed))]


async def satisfies(names: Sequence[str], size: Size, seed: int, venue: Venue) -> Scored:
    """Sessions, in turn, until three first replies in a row satisfied each of the people, who share one account.

    Who is satisfied comes no more: the sessions that were not needed count as passed.
    """
    (chat,) = venue.people
    lessons = {name: Teaching(chat, load(name), seed, **venue.teaching) for name in names}
    asked = {name: questions(name, "train", seed) for name in names}
    for number in range(size.most_sessions):
        for name, lesson in lessons.items():
            if not lesson.held:
                await teach(venue, lesson, cycled(asked[name], number * size.turns, size.turns), size.turns)
    marks = []
    for name, lesson in lessons.items():
        replies = lesson.first_replies + [True] * (size.most_sessions - len(lesson.first_replies))
        marks += [(f"{name}, {session}", passed) for session, passed in numbered(replies)]
    until = {name: sessions_until_adherence(lesson.first_replies, RUN) for name, lesson in lessons.items()}
    held = [lesson.held for lesson in lessons.values() if lesson.held]
    last = max(held, key=lambda one: one.seconds) if len(held) == len(lessons) else None
    return Scored(marks, {}, last, {"sessions_until": until})


# Sense


def sense_items(size: Size, seed: int) -> list[TrackItem]:
    return [TrackItem("sense", "after a wish", partial(keeps_sense, size, seed))]


async def keeps_sense(size: Size, seed: int, venue: Venue) -> Scored:
    """The same cases before and after somebody has taught a wish that none of them is about."""
    (chat,) = venue.people
    wish = draw(Random(f"benchmark sense {seed}"), ["begins"]).wish
    lesson = Teaching.of(chat, wish, seed, **venue.teaching)
    refused: dict[str, ServerError] = {}

    async def ask(name: str) -> MarkList:
        try:
            return await SENSE[name](chat, size, seed)
        except ServerError as error:
            if not error.is_refusal:
                raise
            refused[name] = error
            return []

    # At the same time, as the answers of each are: a server computes many together in the time of a few.
    before = await run_concurrently([*SENSE], ask, len(SENSE))
    if len(refused) == len(SENSE):
        raise next(iter(refused.values()))
    await teach(venue, lesson, cycled(wish.questions("train", seed), 0, size.sessions))
    await venue.learn(size.quiet_seconds)
    asked = [name for name in SENSE if name not in refused]
    after = await run_concurrently(asked, lambda name: SENSE[name](chat, size, seed), len(SENSE))
    parts = {"before": [*chain(*before)], **dict(zip(asked, after, strict=True))}
    return Scored([*chain(*after)], parts, facts={"refused": {name: str(error) for name, error in refused.items()}})


async def plain_marks(chat: OrdinaryChat, size: Size, seed: int) -> MarkList:
    # Any persona will do: what it wants is not looked at.
    answers = await questioned(chat, load(PEOPLE[0]), held_out(seed, size.questions), seed)
    return [(one.question.text, not one.faults) for one in answers]


async def code_marks(chat: OrdinaryChat, size: Size, seed: int) -> MarkList:
    return await task_marks(eval_tasks.code(size.cases), chat, seed)


async def tool_marks(chat: OrdinaryChat, size: Size, seed: int) -> MarkList:
    # Whoever never calls a tool must not pass where none is needed.
    cases = [case for case in tool_use.cases() if case.calls]
    return await task_marks(eval_tasks.tools(tool_use.TASK, cases, size.cases), chat, seed)


async def task_marks(plan: EvalPlan, chat: OrdinaryChat, seed: int) -> MarkList:
    return [(case.case, case.passed) for case in (await plan.ask(chat, seed, lambda _: None)).cases]


#: What shows sense.
SENSE = {"plain": plain_marks, "coding": code_marks, "tool use": tool_marks}


# Many wishes, wishes that are taken back, and those of others


def many_items(size: Size, seed: int) -> list[TrackItem]:
    return [TrackItem("many", f"{size.many} wishes", partial(keeps_many, size, seed))]


def compatible(count: int, seed: int) -> list[DrawnWish]:
    """Wishes that one answer can keep all: each place but one takes a single wish."""
    dice = Random(f"benchmark many {seed}")
    places = ["begins", "ends", "last line", *["says"] * count][:count]
    dice.shuffle(places)
    drawn: list[DrawnWish] = []
    for place in places:
        drawn.append(draw(dice, [place], [one.words for one in drawn]))
    return drawn


async def keeps_many(size: Size, seed: int, venue: Venue) -> Scored:
    """Wishes one after another, each in a few sessions; at the end, which of them the same answers keep."""
    (chat,) = venue.people
    drawn = compatible(size.many, seed)
    asked = questions(split="train", seed=seed)
    for number, one in enumerate(drawn):
        lesson = Teaching.of(chat, one.wish, seed + number, **venue.teaching)
        await teach(venue, lesson, cycled(asked, number * size.sessions // 2, size.sessions // 2))
    await venue.learn(size.quiet_seconds)
    answers = await questioned(chat, drawn[0].wish.persona, held_out(seed, size.questions), seed)
    kept = {
        one.wish.name: [(a, not one.wish.persona.failed(a.answer) and not a.faults) for a in answers] for one in drawn
    }
    marks = [(f"{name}: {a.question.text}", passed) for name, marks in kept.items() for a, passed in marks]
    shares = {name: sum(passed for _, passed in found) / len(found) for name, found in kept.items()}
    return Scored(marks, {}, None, {"kept": shares})


def change_items(size: Size, seed: int) -> list[TrackItem]:
    drawn = one_drawn("change", seed)
    return [TrackItem("change-of-mind", drawn.wish.name, partial(follows_change, drawn, size, seed))]


def one_drawn(track: str, seed: int) -> DrawnWish:
    return draw(Random(f"benchmark {track} {seed}"), ["begins", "says"])


async def taught(venue: Venue, drawn: DrawnWish, size: Size, seed: int) -> tuple[Teaching, list[ExamAnswer]]:
    """Somebody who has taught a wish, and the answers to held-out questions after it."""
    lesson = Teaching.of(venue.people[0], drawn.wish, seed, **venue.teaching)
    await teach(venue, lesson, cycled(drawn.wish.questions("train", seed), 0, size.sessions))
    await venue.learn(size.quiet_seconds)
    asked = held_out(seed, size.questions)
    return lesson, await questioned(lesson.chat, lesson.persona, asked, seed)


def both(first: MarkList, second: MarkList) -> MarkList:
    return [(name, passed and again) for (name, passed), (_, again) in zip(first, second, strict=True)]


async def follows_change(drawn: DrawnWish, size: Size, seed: int, venue: Venue) -> Scored:
    """A wish that is taught and then taken back. A question passes that was answered as wished, and then without it."""
    lesson, then = await taught(venue, drawn, size, seed)
    back = Teaching.of(lesson.chat, drawn.back, seed + 1, **venue.teaching)
    asked = drawn.back.questions("train", seed)
    await teach(venue, back, cycled(asked, size.sessions, size.sessions))
    await venue.learn(size.quiet_seconds)
    now = await questioned(back.chat, back.persona, held_out(seed, size.questions), seed)
    kept, dropped = marks_of(then), marks_of(now)
    return Scored(both(kept, dropped), {"kept": kept, "without it afterwards": dropped}, back.held)


def two_items(size: Size, seed: int) -> list[TrackItem]:
    return [TrackItem("two-people", "two people", partial(keeps_apart, size, seed), people=2)]


async def keeps_apart(size: Size, seed: int, venue: Venue) -> Scored:
    """Two people. A question passes that is answered as its person wishes, without what the other wishes."""
    dice = Random(f"benchmark two {seed}")
    first = draw(dice, ["begins", "says"])
    wishes = [first, draw(dice, ["begins", "says"], [first.words])]
    lessons = [
        Teaching.of(chat, one.wish, seed, **venue.teaching) for chat, one in zip(venue.people, wishes, strict=True)
    ]
    for question in cycled(questions(split="train", seed=seed), 0, size.sessions):
        for lesson in lessons:
            await teach(venue, lesson, [question])
    await venue.learn(size.quiet_seconds)

    async def exam(lesson: Teaching) -> list[ExamAnswer]:
        return await questioned(lesson.chat, lesson.persona, held_out(seed, size.questions), seed)

    marks, leaked = [], []
    exams = await run_concurrently(lessons, exam, len(lessons))
    for lesson, other, answers in zip(lessons, reversed(wishes), exams, strict=True):
        for one in answers:
            name, leaks = f"{lesson.persona.name}: {one.question.text}", bool(other.back.persona.failed(one.answer))
            marks.append((name, one.passed and not leaks))
            leaked.append((name, leaks))
    return Scored(marks, {"leaked": leaked})


def forget_items(size: Size, seed: int) -> list[TrackItem]:
    drawn = one_drawn("forget", seed)
    return [TrackItem("forget", drawn.wish.name, partial(forgets, drawn, size, seed))]


async def forgets(drawn: DrawnWish, size: Size, seed: int, venue: Venue) -> Scored:
    """A question passes that was answered as wished, and after deletion without it. Raises NotOffered."""
    if venue.forget is None:
        raise NotOffered("The endpoint offers no way to delete what somebody said: give --forget-url.")
    lesson, then = await taught(venue, drawn, size, seed)
    await venue.forget(0)
    now = await questioned(lesson.chat, drawn.back.persona, held_out(seed, size.questions), seed)
    kept, gone = marks_of(then), marks_of(now)
    return Scored(both(kept, gone), {"kept": kept, "gone afterwards": gone}, lesson.held)


# Tools


def tool_items(size: Size, seed: int) -> list[TrackItem]:
    return [TrackItem("tools", "toolcall", partial(improves_calls, size, seed))]


async def improves_calls(size: Size, seed: int, venue: Venue) -> Scored:
    """Rounds of tool calls to whose results somebody reacts; the score is that of held-out tasks after the last one."""
    (chat,) = venue.people
    environment = ToolCallEnvironment()
    exam = list(islice(environment.tasks(HELD_OUT, seed), size.tasks))
    train = environment.tasks(TRAIN, seed)
    parts = {"before": await attempts(chat, environment, exam, seed)}
    for number in range(1, size.rounds + 1):
        await attempts(chat, environment, list(islice(train, size.tasks)), seed, reacts=True)
        await venue.settle()
        await venue.learn(size.quiet_seconds)
        parts[f"after round {number}"] = await attempts(chat, environment, exam, seed)
    return Scored(parts[f"after round {size.rounds}"], parts)


async def attempts(
    chat: OrdinaryChat, environment: ToolCallEnvironment, tasks: Sequence[Task], seed: int, *, reacts: bool = False
) -> MarkList:
    async def one(task: Task) -> tuple[str, bool]:
        return task.id, await attempt(chat, environment, task, seed, reacts=reacts)

    return list(await run_concurrently(tasks, one, TOOLS_AT_ONCE))


async def attempt(chat: OrdinaryChat, environment: ToolCallEnvironment, task: Task, seed: int, *, reacts: bool) -> bool:
    """Whether a task is solved. Who `reacts` sends the results back, and says whether it was right."""
    episode = environment.open(task)
    messages = list(answered(await episode.start()))
    hint = ""
    for turn in range(TOOL_TURNS):
        reply = await chat.ask(
            messages, tools=episode.tools, max_tokens=MAX_TOOL_TOKENS, temperature=0.0, seed=seed + turn
        )
        messages.append(answer_message(reply, turn))
        step = await episode.step(messages[-1])
        messages += [dict(message) for message in step.messages]
        hint = step.hint or hint
        if step.done:
            break
    outcome = await episode.outcome()
    await episode.close()
    if reacts:
        said = "Perfect, thanks!" if outcome.solved else f"No, that was wrong. {outcome.hint or hint}".strip()
        messages.append({"role": "user", "content": said})
        await chat.ask(list(answered(messages)), tools=episode.tools, max_tokens=1, temperature=0.0, seed=seed)
    return outcome.solved


def answered(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """The messages, with a result for each call that has none: endpoints refuse a conversation without it."""
    given = {message.get("tool_call_id") for message in messages}
    for message in messages:
        yield dict(message)
        for call in message.get("tool_calls") or ():
            if call["id"] not in given:
                yield {"role": "tool", "tool_call_id": call["id"], "content": "done"}


def answer_message(reply: Reply, turn: int) -> dict[str, Any]:
    """A reply as a message of the conversation."""
    calls = [
        {
            "id": f"call{turn}{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for number, call in enumerate(reply.tool_calls)
    ]
    return {"role": "assistant", "content": reply.text, **({"tool_calls": calls} if calls else {})}


#: By name, what makes the items of a track.
TRACKS: dict[str, Callable[[Size, int], list[TrackItem]]] = {
    "wishes": wish_items,
    "people": people_items,
    "sense": sense_items,
    "many": many_items,
    "change-of-mind": change_items,
    "two-people": two_items,
    "forget": forget_items,
    "tools": tool_items,
}
