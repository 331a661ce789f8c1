"""Measures whether people with different wishes on one server each get what they want.

    python benchmarks/team.py --out FOLDER [--modes alone,shared,lines] [--seeds 3] [--seconds 265] [-- server options]

Real servers with the embedded model, or the one in BENCH_MODEL, all at the same time. On a GPU hand them
`-- --device cuda --kv-cache-gib 1`; two CPU cores are enough for one mode and seed (`--modes lines --seeds 1`).
- `alone`, `shared` and `lines`: two simulated people with opposite wishes talk, each on a server of their own, both on
  one line, and both on lines of their own. They are examined before and after, with questions that nobody asked.
- `eight`: eight people with a wish each on one server, with lines. Each corrects two answers, then their notes are
  practised, and each line is examined for all eight wishes.
All examinations are without notes. Results are printed as they come, and are in FOLDER/results.json and table.txt;
FOLDER/servers has the runs. People stop talking when the rest of --seconds is needed for the last examination.
"""

import argparse
import asyncio
import contextlib
import io
import json
import os
import tempfile
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

from common import MODEL, SMOKE, argument_parser, machine, sized, table, verdict

from openclaw_rl.client import ServerError
from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.examination import ExamAnswer, examine
from openclaw_rl.evals.personas.persona import load
from openclaw_rl.evals.trial import Exam, Trial, TrialOutcome, TrialPlan
from openclaw_rl.evals.wishes.measurement import PEOPLE, TEMPERATURE, ExamPlan, WishMeasurement, practised
from openclaw_rl.evals.wishes.wish import EvalWish
from openclaw_rl.evals.wishes.wish import load as load_wish
from openclaw_rl.lab.commands import first
from openclaw_rl.lab.server import RunningServer, ServerFailed, run_server
from openclaw_rl.lab.statistics import proportion_of_trials
from openclaw_rl.types import ENDED_PRACTICE, Practice

OPPOSITE = ("brief", "teaching-assistant")
TOGETHER = ("alone", "shared", "lines")
EIGHT = "eight"
#: Whose answers are those of nobody's line.
BASE = "nobody"
#: Wishes that practice teaches this model, which it hardly ever keeps by itself.
WISHES = sized(("chef", "well", "tldr", "bullets", "source", "lower-case", "confidence", "french"), ("chef", "well"))
#: Of what they reach alone, what people reach at least on lines of their own.
LEAST_SHARE = 0.9
METHOD = "notes+combine"
#: Seconds at the end for the last steps, and for the last examinations.
SETTLE, EXAMINE = sized(20.0, 2.0), sized(40.0, 20.0)
#: How many of the latter a practice has that is stopped.
STOP = sized(10.0, 5.0)
QUESTIONS = sized(40, 2)


@dataclass(slots=True)
class Measured:
    """What was measured so far, and until when more may be."""

    out: Path
    end: float
    began: float = field(default_factory=time.monotonic)
    trials: dict[tuple[str, int, str], TrialOutcome] = field(default_factory=dict)
    eight: dict[str, dict[str, float]] = field(default_factory=dict)
    """By whose line answered, by wish, the share of answers that keep it."""
    notes: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.began:5.0f} s  {text}", flush=True)

    def minutes_left(self, reserve: float) -> float:
        return max(0.0, self.end - reserve - time.monotonic()) / 60

    def write(self) -> None:
        trials = [
            {
                "mode": mode,
                "seed": seed,
                "person": person,
                "sessions": len(outcome.sessions),
                "exams": [(exam.version, round(exam.seconds), exam.adherence) for exam in outcome.exams],
                "with_notes": outcome.noted.adherence if outcome.noted else None,
                "complete": outcome.is_complete,
            }
            for (mode, seed, person), outcome in sorted(self.trials.items())
        ]
        found = {"trials": trials, "eight": self.eight, "notes": self.notes}
        (self.out / "results.json").write_text(json.dumps(found, indent=1) + "\n")


@dataclass(frozen=True, slots=True)
class Watch:
    """Says what was found in examinations."""

    measured: Measured
    where: str

    def starting(self, plan: TrialPlan) -> None: ...
    def started(self, plan: TrialPlan) -> None: ...
    def talking(self, outcome: TrialOutcome, seconds: float, state: str) -> None: ...
    def examining(self, outcome: TrialOutcome, seconds: float, done: int, total: int) -> None: ...

    def examined(self, outcome: TrialOutcome, exam: Exam) -> None:
        name, held = outcome.plan.persona.name, len(outcome.sessions)
        self.measured.say(f"{self.where}, {name}: policy {exam.version}, {held} sessions, {exam.adherence:.2f}")
        self.measured.write()


def keys_of(people: Sequence[str]) -> dict[str, str]:
    return {name: f"sk-{number}-{name}" for number, name in enumerate(people)}


def options(mode: str, seed: int, people: Sequence[str], given: Sequence[str]) -> list[str]:
    """The options of a server. Nothing is practised unless somebody asks for it."""
    preset = "team" if mode in ("lines", EIGHT) else "personal"
    named = ",".join(f"{name}={key}" for name, key in keys_of(people).items())
    flags = ["--preset", preset, "--no-practice", "--judge", "feedback", "--seed", str(seed), "--api-key", named]
    flags += ["--admin-key", "sk-admin", "--proxy-host", "127.0.0.1", *(["--model-name", MODEL] if MODEL else [])]
    return [*flags, *(["--distil-personal"] if mode == "shared" else []), *given]


async def talk_all(mode: str, seed: int, people: Sequence[str], given: argparse.Namespace, measured: Measured) -> None:
    """All these people at once on one server."""
    folder = measured.out / "servers" / "-".join((mode, str(seed), *people))
    async with run_server(folder, *options(mode, seed, people, given.flags)) as server, asyncio.TaskGroup() as tasks:
        for name, key in keys_of(people).items():
            minutes = measured.minutes_left(SETTLE + EXAMINE)
            plan = TrialPlan(METHOD, load(name), seed, folder, given.sessions, minutes, exam_every=given.exam_every)
            outcome = measured.trials[mode, seed, name] = TrialOutcome(plan)
            tasks.create_task(talk(outcome, key, server, Watch(measured, f"{mode}, seed {seed}")))


async def talk(outcome: TrialOutcome, key: str, server: RunningServer, watch: Watch) -> None:
    async with Chat(server.url, key=key) as chat:
        trial = Trial(outcome, RunningServer(server.url, server.run_dir, key), chat, watch)
        trial.settle_seconds = SETTLE
        await trial.run()


async def practise_eight(seed: int, given: argparse.Namespace, measured: Measured) -> None:
    """Eight people teach one server a wish each; then their lines practise, one after the other."""
    folder, wishes = measured.out / "servers" / EIGHT, {name: load_wish(name) for name in WISHES}
    keys, plan = keys_of(WISHES), ExamPlan(QUESTIONS, seed, 16)
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(run_server(folder, *options(EIGHT, seed, WISHES, given.flags)))
        chats = {name: await stack.enter_async_context(Chat(server.url, key=key)) for name, key in keys.items()}

        async def teach(name: str) -> None:
            own = RunningServer(server.url, folder, keys[name])
            taught = WishMeasurement(wishes[name], own, dict.fromkeys(PEOPLE, chats[name]), plan)
            await taught.teach()
            exams = taught.outcome.exams
            measured.say(f"{EIGHT}, {name}: {', '.join(f'{which} {exams[which].kept.mean:.2f}' for which in exams)}")
            measured.eight[BASE] = shares(wishes.values(), exams["before"].answers)

        async with asyncio.TaskGroup() as tasks:
            for name in WISHES:
                tasks.create_task(teach(name))
        ended: set[int] = set()
        async for practices in practised(folder, 60 * measured.minutes_left(EXAMINE)):
            for one in practices:
                if one.state in ENDED_PRACTICE and one.number not in ended:
                    ended.add(one.number)
                    measured.notes.append(words(one))
                    measured.say(f"{EIGHT}, {words(one)}")
            if not measured.minutes_left(EXAMINE - STOP):
                break
        async with asyncio.TaskGroup() as tasks:
            for name in WISHES:
                tasks.create_task(examine_line(name, chats[name], list(wishes.values()), plan, measured))


def words(one: Practice) -> str:
    return f"{one.owner}: {one.made} steps, {one.state}: {one.reason}"


async def examine_line(name: str, chat: Chat, wishes: Sequence[EvalWish], plan: ExamPlan, measured: Measured) -> None:
    """Ask one person's line, and look for all wishes in its answers."""
    own = next(wish for wish in wishes if wish.name == name)
    answers = await examine(
        chat,
        own.persona,
        plan.inside(own),
        max_tokens=own.persona.longest_answer,
        seed=plan.seed,
        temperature=TEMPERATURE,
        at_once=plan.at_once,
    )
    measured.eight[name] = shares(wishes, answers)
    passed = sum(answer.passed for answer in answers) / len(answers)
    measured.notes.append(f"{name}: {passed:.2f} keep it and are sensible")
    measured.say(f"{EIGHT}, {measured.notes[-1]}")
    measured.write()


def shares(wishes: Iterable[EvalWish], answers: Sequence[ExamAnswer]) -> dict[str, float]:
    """By wish, the share of answers that keep it."""
    kept = {wish.name: sum(not wish.persona.failed(answer.answer) for answer in answers) for wish in wishes}
    return {name: count / len(answers) for name, count in kept.items()}


async def measure(given: argparse.Namespace, measured: Measured) -> None:
    """Run all servers at the same time, and stop them when the time is up. One that fails stops no other."""

    async def one(what: str, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except* (ServerError, ServerFailed) as errors:
            measured.say(f"{what} failed: {first(errors)}")

    seeds = range(given.seed, given.seed + given.seeds)
    works = []
    for mode, seed in product([mode for mode in given.modes if mode != EIGHT], seeds):
        for people in [(name,) for name in OPPOSITE] if mode == "alone" else [OPPOSITE]:
            works.append((f"{mode}, seed {seed}", talk_all(mode, seed, people, given, measured)))
    if EIGHT in given.modes:
        works.append((EIGHT, practise_eight(given.seed, given, measured)))
    if len(works) > 1:
        # Many servers share the cores.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
    running = [asyncio.create_task(one(what, work)) for what, work in works]
    done, late = await asyncio.wait(running, timeout=measured.end - time.monotonic())
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    await asyncio.gather(*done)


def show(given: argparse.Namespace, measured: Measured) -> None:
    if trials := {place: outcome for place, outcome in measured.trials.items() if outcome.exams}:
        show_people(given, trials)
    if measured.eight:
        rows = [(name, *(f"{share:.2f}" for share in found.values())) for name, found in measured.eight.items()]
        table("Answers of each person's line that keep each wish", ("line of", *WISHES), rows)
        people = {name: found for name, found in measured.eight.items() if name != BASE}
        if people:
            own = [found[name] for name, found in people.items()]
            others = [share for name, found in people.items() for wish, share in found.items() if wish != name]
            print(f"  own wish {sum(own) / len(own):.2f}, other people's {sum(others) / len(others):.2f} on average")


def show_people(given: argparse.Namespace, trials: dict[tuple[str, int, str], TrialOutcome]) -> None:
    rows: list[Sequence[object]] = []
    reached: dict[tuple[str, str], float] = {}
    for mode, name in product([mode for mode in given.modes if mode != EIGHT], OPPOSITE):
        found = [outcome for (which, _, person), outcome in sorted(trials.items()) if (which, person) == (mode, name)]
        if not found:
            continue
        shares = []
        for exams in ([outcome.exams[0] for outcome in found], [outcome.exams[-1] for outcome in found]):
            marks = [[(answer.question.text, answer.passed) for answer in exam.answers] for exam in exams]
            shares.append(proportion_of_trials(marks))
        reached[mode, name] = shares[1].mean
        alone = reached.get(("alone", name))
        share = reached[mode, name] / alone if alone and mode != "alone" else None
        said = "" if share is None else f"{share:.2f} of alone"
        said += f", {verdict(share, LEAST_SHARE)}" if share is not None and mode == "lines" else ""
        last = " ".join(f"{outcome.exams[-1].adherence:.2f}" for outcome in found)
        sessions = " ".join(str(len(outcome.sessions)) for outcome in found)
        after = f"{shares[1].mean:.2f} ({shares[1].low:.2f}–{shares[1].high:.2f})"
        policies = " ".join(str(outcome.exams[-1].version) for outcome in found)
        rows.append((mode, name, f"{shares[0].mean:.2f}", after, last, policies, sessions, said))
    head = ("mode", "person", "before", "after", "by seed", "policies", "sessions", "")
    table("Answers as each person wants them, without notes", head, rows)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--out", type=Path, default=Path(tempfile.mkdtemp()) if SMOKE else Path("runs/team"), help="of the results"
    )
    parser.add_argument("--modes", default=",".join(TOGETHER), help="some of alone, shared, lines, eight")
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--seeds", type=int, default=sized(3, 1), help="how many")
    parser.add_argument("--sessions", type=int, default=sized(60, 1), help="of each person, at most")
    parser.add_argument("--seconds", type=float, default=sized(265.0, 120.0), help="of a trial, in all")
    parser.add_argument("--exam-every", type=int, default=1000, help="policies between two short examinations")
    parser.add_argument("flags", nargs="*", help="further options of the servers, after --")
    given = parser.parse_args()
    given.modes = given.modes.split(",")
    if unknown := set(given.modes) - {*TOGETHER, EIGHT}:
        parser.error(f"there is no mode {', '.join(sorted(unknown))}")
    given.out.mkdir(parents=True, exist_ok=True)
    measured = Measured(given.out, time.monotonic() + given.seconds)
    try:
        asyncio.run(measure(given, measured))
    finally:
        measured.write()
        with contextlib.redirect_stdout(io.StringIO()) as text:
            print(machine())
            show(given, measured)
        (given.out / "table.txt").write_text(text.getvalue())
        print(text.getvalue())


if __name__ == "__main__":
    main()
