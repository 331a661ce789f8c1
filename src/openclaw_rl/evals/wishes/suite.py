"""`openclaw-rl wishes`: how well and how soon a model keeps what people wish, wish by wish."""

import argparse
import contextlib
import itertools
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from openclaw_rl import __version__, terminal
from openclaw_rl.aio import run_concurrently
from openclaw_rl.config.general import PERSONAL
from openclaw_rl.errors import UserError
from openclaw_rl.evals.arguments import Machine
from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.demo import share
from openclaw_rl.evals.result_log import ResultLog
from openclaw_rl.evals.wishes.measurement import (
    COMPLAINS,
    CORRECTS,
    EXAMS,
    MAX_SESSIONS,
    PEOPLE,
    PRACTISED,
    ExamPlan,
    WishExam,
    WishMeasurement,
    WishOutcome,
)
from openclaw_rl.evals.wishes.wish import EvalWish, built_in, load
from openclaw_rl.http_client import text_without_accounts
from openclaw_rl.lab.commands import (
    new_folder,
    print_without_bar,
    progress_bar,
    run_stoppable,
    write_text,
)
from openclaw_rl.lab.server import run_server
from openclaw_rl.lab.statistics import Interval

#: Where results are written without `--out`.
DEFAULT_OUT = Path("runs/wishes")
#: The server's options. It listens on this machine only and judges by rules. Without practice it does not train, so
#: that a wish is kept because of notes and examples alone. Options after `--` come later and override these.
SERVER_FLAGS = ("--preset", PERSONAL, "--judge", "feedback", "--proxy-host", "127.0.0.1")
WITHOUT_TRAINING = ("--max-steps", "0")
#: Requests at the same time in all examinations together. A server takes 250 connections from one address.
MAX_REQUESTS = 128


def measure_wishes(machine: Machine, options: argparse.Namespace, server: Sequence[str]) -> int:
    """Measure the chosen wishes with a server of their own that has the further options `server`."""
    console = terminal.console()
    wishes = chosen(options.names, options.set)
    plan = ExamPlan(options.questions, machine.seed, max(1, MAX_REQUESTS // min(options.at_once, len(wishes))))
    api, others = api_of(server)
    out = options.out or new_folder(DEFAULT_OUT)
    command = command_line(machine, options, server)
    head = {"version": __version__, "model": api or machine.policy_name, "command": command}
    log = ResultLog(out / "results.jsonl", head, [*head])
    done = {line["wish"] for line in log.lines}
    left = [wish for wish in wishes if wish.name not in done]
    training = () if options.practise else WITHOUT_TRAINING
    every = (*SERVER_FLAGS, *training, "--seed", str(machine.seed))
    flags = (*every, *(machine.flags if api else machine.model_flags), *server)
    if left and (options.practise or not api):
        machine.fetch_model()
    own = (*every, *machine.model_flags, *others) if api else ()
    try:
        if left and options.practise:
            run_stoppable(measure_practised(left, plan, out, flags, own, options.at_once, log, console), console)
        elif left:
            run_stoppable(measure_all(left, plan, out, flags, options.at_once, log, console), console)
    finally:
        # Also after an error or Ctrl-C: a wish takes minutes on a small machine.
        found = {one["wish"]: one for one in log.lines}
        if results := [found[wish.name] for wish in wishes if wish.name in found]:
            write_text(out / "wishes.md", markdown(results))
            console.print(table(results))
            console.print(f"Every answer: {log.path}   Table: {out / 'wishes.md'}", soft_wrap=True)
    return 0


def api_of(server: Sequence[str]) -> tuple[str, list[str]]:
    """The model of the API that a server with these options is in front of, if it is; and the other options."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--sampler", "--upstream-url", "--upstream-model", "--upstream-timeout"):
        parser.add_argument(name, default="")
    found, others = parser.parse_known_args(list(server))
    return found.upstream_model, others


def chosen(names: Sequence[str], group: str) -> list[EvalWish]:
    """The named wishes, or those of a set. Raises UserError."""
    if not names:
        return [wish for wish in built_in().values() if group in ("all", wish.group)]
    wishes = [load(name) for name in dict.fromkeys(names)]
    if len({wish.name for wish in wishes}) < len(wishes):
        raise UserError("Two of the wishes have the same name.")
    return wishes


#: Measures a wish, and says meanwhile what it does.
Measure = Callable[[EvalWish, Callable[[str], None]], Awaitable[WishOutcome]]


async def measure_each(
    wishes: Sequence[EvalWish], at_once: int, log: ResultLog, console: Console, measure: Measure
) -> None:
    """Write down the outcome of each wish when it is done, `at_once` at a time. Raises ServerFailed or ServerError."""
    with progress_bar(console) as bar:
        shown = bar.add_task("wishes", total=len(wishes), note="")
        goes_on = f"If it is stopped, the same command with --out {log.path.parent} goes on."
        print_without_bar(console, f"Wishes: {len(wishes)}. {goes_on}")

        async def one(wish: EvalWish) -> None:
            outcome = await measure(wish, lambda what: bar.update(shown, note=what))
            log.add(data := outcome_data(outcome))
            bar.advance(shown)
            print_without_bar(console, line(data))

        await run_concurrently(wishes, one, at_once)


async def measure_all(
    wishes: Sequence[EvalWish],
    plan: ExamPlan,
    out: Path,
    flags: Sequence[str],
    at_once: int,
    log: ResultLog,
    console: Console,
) -> None:
    """Measure what notes and corrections do. One server is enough, because nothing is trained."""
    owners = [owner(wish, person) for wish in wishes for person in PEOPLE]
    console.print("Starting a server …")
    async with run_server(new_folder(out / "server"), *flags, people=owners) as server:

        async def measure(wish: EvalWish, advance: Callable[[str], None]) -> WishOutcome:
            async with contextlib.AsyncExitStack() as stack:
                chats = [Chat(server.url, key=server.keys[owner(wish, person)]) for person in PEOPLE]
                people = [await stack.enter_async_context(chat) for chat in chats]
                return await WishMeasurement(wish, server, dict(zip(PEOPLE, people, strict=True)), plan, advance).run()

        await measure_each(wishes, at_once, log, console, measure)


async def measure_practised(
    wishes: Sequence[EvalWish],
    plan: ExamPlan,
    out: Path,
    flags: Sequence[str],
    own: Sequence[str],
    at_once: int,
    log: ResultLog,
    console: Console,
) -> None:
    """Measure what practice does. Each wish has a server of its own, because practice changes the policy for all.

    If that server is in front of an API, a server with the options `own` takes over what was taught, and practises.
    """

    async def measure(wish: EvalWish, advance: Callable[[str], None]) -> WishOutcome:
        advance(f"{wish.name}: starting a server")
        taught = new_folder(out / wish.name)
        async with run_server(taught, *flags) as server, Chat(server.url) as chat:
            measured = WishMeasurement(wish, server, dict.fromkeys(PEOPLE, chat), plan, advance)
            await measured.teach()
            if not own:
                return await measured.practise()
        advance(f"{wish.name}: starting a server that learns")
        learns = run_server(taught.with_name(f"{taught.name}-own"), *own, "--continue-from", str(taught))
        async with learns as server, Chat(server.url) as chat:
            measured.move(server, chat)
            return await measured.practise()

    await measure_each(wishes, at_once, log, console, measure)


def owner(wish: EvalWish, person: str) -> str:
    return f"{wish.name}.{person}"


#: What was measured of a wish, as `outcome_data` makes it.
WishData = Mapping[str, Any]


def line(wish: WishData) -> str:
    """A wish in one line."""
    shares = ", ".join(f"{name} {part(wish, name).mean:.2f}" for name in exams_of([wish]))
    if wish["practices"]:
        return f"{wish['wish']}: {shares}; {practice_text(wish)}"
    sessions = " and ".join(f"{sessions_text(wish, person)} ({person})" for person in (CORRECTS, COMPLAINS))
    return f"{wish['wish']}: {shares}; sessions {sessions}"


def practice_text(wish: WishData) -> str:
    """How its notes were practised."""
    return "; ".join(
        f"{one['made']} steps in {((one['ended'] or one['created']) - one['created']) / 60:.1f} minutes, "
        f"{one['state']}: {one['reason']}"
        for one in wish["practices"]
    )


def exams_of(wishes: Sequence[WishData]) -> list[str]:
    """The examinations that all wishes have."""
    return [name for name in (*EXAMS, PRACTISED) if all(name in wish["exams"] for wish in wishes)]


def part(wish: WishData, exam: str, name: str = "kept") -> Interval:
    return Interval(**wish["exams"][exam][name])


def sessions_text(wish: WishData, person: str) -> str:
    return str(wish["sessions"].get(person) or f"> {MAX_SESSIONS}")


def table(wishes: Sequence[WishData]) -> Table:
    """The results. Each row has two lines, so that the table fits a terminal of 80 columns."""
    results = Table(title="Unseen questions answered as wished, in % (95 % interval)", title_justify="left")
    exams = exams_of(wishes)
    short = [name.replace(" correction", "\ncorrect.").removesuffix("s") for name in exams]
    for heading in ("wish", *short, "sensible\nafter", *([] if PRACTISED in exams else ["sessions\nuntil 3"])):
        results.add_column(heading, no_wrap=True)
    for wish in wishes:
        corrects, complains = (sessions_text(wish, person) for person in (CORRECTS, COMPLAINS))
        results.add_row(
            wish["wish"],
            *(share(part(wish, name)) for name in exams),
            share(part(wish, exams[-1], "sensible")),
            *([] if PRACTISED in exams else [f"{corrects}\n({complains})"]),
            end_section=True,
        )
    if PRACTISED in exams:
        results.caption = "Practised: without notes and examples"
    else:
        results.caption = "Sessions until three first replies in a row: who corrects (who only complains)"
    return results


def markdown(wishes: Sequence[WishData]) -> str:
    """The results as a table for a page. Shares of the exams with their intervals."""
    exams = exams_of(wishes)
    heads = ["wish", "set", *exams, "sensible before", "sensible after", "elsewhere"]
    heads += ["practice"] if PRACTISED in exams else ["sessions, corrects", "sessions, complains"]
    heads += ["note"]
    rows = [heads, ["---"] * len(heads)]
    for wish in wishes:
        sessions = [sessions_text(wish, person) for person in (CORRECTS, COMPLAINS)]
        rows.append(
            [
                f"`{wish['wish']}`",
                wish["set"],
                *(str(part(wish, name)) for name in exams),
                *(str(part(wish, name, "sensible")) for name in (exams[0], exams[-1])),
                str(part(wish, exams[-1], "elsewhere")) if wish["exams"][exams[-1]]["elsewhere"] else "",
                *([practice_text(wish)] if PRACTISED in exams else sessions),
                note_text(wish["note"]),
            ]
        )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def note_text(note: Mapping[str, Any]) -> str:
    """How the note of the corrections came about."""
    texts = "; ".join(text.replace("|", "\\|") for text in note["texts"])
    return f"{'read' if note['read'] else 'given'}: {texts}"


def outcome_data(outcome: WishOutcome) -> dict[str, Any]:
    """A wish as data for JSON."""
    return {
        "wish": outcome.wish.name,
        "set": outcome.wish.group,
        "note": {"read": outcome.note_was_read, "texts": outcome.notes},
        "corrections": outcome.corrections,
        "sessions": {person: outcome.sessions(person) for person in outcome.first_replies},
        "first_replies": outcome.first_replies,
        "practices": [asdict(one) for one in outcome.practices],
        "exams": {name: exam_data(exam) for name, exam in outcome.exams.items()},
    }


def exam_data(exam: WishExam) -> dict[str, Any]:
    answers = itertools.chain(((True, answer) for answer in exam.answers), ((False, answer) for answer in exam.others))
    return {
        "kept": asdict(exam.kept),
        "sensible": asdict(exam.sensible),
        "elsewhere": asdict(exam.elsewhere) if exam.elsewhere else None,
        "answers": [
            {
                "question": answer.question.text,
                "in_scope": in_scope,
                "answer": answer.answer,
                "keeps_wish": answer.keeps_rules,
                "faults": answer.faults,
            }
            for in_scope, answer in answers
        ],
    }


def command_line(machine: Machine, options: argparse.Namespace, server: Sequence[str]) -> str:
    """The command that repeats this measurement, without the passwords of URLs."""
    words = ["openclaw-rl", "wishes", *(["--practise"] if options.practise else [])]
    words += [] if options.names else ["--set", options.set]
    words += ["--questions", str(options.questions), "--at-once", str(options.at_once), *machine.typed]
    words += [*options.names, *(["--", *server] if server else [])]
    return shlex.join(map(text_without_accounts, words))
