"""`openclaw-rl wishes`: how well and how soon a model keeps what people wish, wish by wish."""

import argparse
import contextlib
import itertools
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from openclaw_rl import __version__, terminal
from openclaw_rl.config.general import PERSONAL
from openclaw_rl.errors import UserError
from openclaw_rl.evals.arguments import Machine
from openclaw_rl.evals.chat import Chat, opened
from openclaw_rl.evals.demo import share
from openclaw_rl.evals.items import ItemGroup, RunItem, left_in_words, run_items
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
from openclaw_rl.lab.commands import RunProgress, new_folder, write_text
from openclaw_rl.lab.server import RunningServer, run_server
from openclaw_rl.lab.statistics import Interval

#: Where results are written without `--out`.
DEFAULT_OUT = Path("runs/wishes")
#: The server's options. It listens on this machine only and judges by rules. Without practice it does not train, so
#: that a wish is kept because of notes and examples alone. Options after `--` come later and override these.
SERVER_FLAGS = ("--preset", PERSONAL, "--judge", "feedback", "--proxy-host", "127.0.0.1")
WITHOUT_TRAINING = ("--max-steps", "0")
#: Requests at the same time in all examinations together. A server takes 250 connections from one address.
MAX_REQUESTS = 128

#: What was measured of a wish, as `outcome_data` makes it.
WishData = Mapping[str, Any]


def measure_wishes(machine: Machine, options: argparse.Namespace, server: Sequence[str]) -> int:
    """Measure the chosen wishes with a server of their own that has the further options `server`."""
    console = terminal.console()
    wishes = chosen(options.names, options.set)
    plan = ExamPlan(options.questions, machine.seed, max(1, MAX_REQUESTS // min(options.at_once, len(wishes))))
    api, others = api_of(server)
    out = options.out or new_folder(DEFAULT_OUT)
    command = command_line(machine, options, server)
    head = {"version": __version__, "model": api or machine.policy_name, "command": command}
    log = ResultLog(out / "results.jsonl", head, [*head], ("wish",))
    training = () if options.practise else WITHOUT_TRAINING
    every = (*SERVER_FLAGS, *training, "--seed", str(machine.seed))
    flags = (*every, *(machine.flags if api else machine.model_flags), *server)
    own = (*every, *machine.model_flags, *others) if api else ()
    left = sum((wish.name,) not in log.done for wish in wishes)
    progress = RunProgress(console, "wishes", left)
    group = WishRun(wishes, plan, out, flags, own, progress).items(log, practise=options.practise)
    if left and (options.practise or not api):
        machine.fetch_model()
    progress.log(f"Wishes: {left_in_words(left, 'wish', 'wishes', out)}")
    run_items([group], options.at_once, progress, partial(show, wishes, log, console))
    return 0


def show(wishes: Sequence[EvalWish], log: ResultLog, console: Console) -> None:
    """Show and write what is done."""
    found = {one["wish"]: one for one in log.lines}
    if results := [found[wish.name] for wish in wishes if wish.name in found]:
        path = log.path.with_name("wishes.md")
        write_text(path, markdown(results))
        console.print(table(results))
        console.print(f"Every answer: {log.path}   Table: {path}", soft_wrap=True)


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


@dataclass(frozen=True, slots=True)
class WishRun:
    """Wishes that are measured together, with the options of their servers."""

    wishes: Sequence[EvalWish]
    plan: ExamPlan
    out: Path
    flags: Sequence[str]
    own: Sequence[str]
    """Those of a server that takes over what was taught, and practises, if the first one is in front of an API."""
    progress: RunProgress

    def items(self, log: ResultLog, *, practise: bool) -> ItemGroup[Any]:
        """What notes and corrections do is measured on one server, because nothing is trained.

        To measure what practice does, each wish has a server of its own: practice changes the policy for all.
        """
        measure: Callable[[EvalWish, Any], Awaitable[WishOutcome]] = self._practise if practise else self._teach

        async def one(wish: EvalWish, server: Any) -> tuple[WishData, str]:
            data = outcome_data(await measure(wish, server))
            return data, line(data)

        items = [RunItem((wish.name,), partial(one, wish)) for wish in self.wishes]
        return ItemGroup(items, contextlib.nullcontext if practise else self._server, log)

    def _server(self) -> AbstractAsyncContextManager[RunningServer]:
        self.progress.console.print("Starting a server …")
        people = [owner(wish, person) for wish in self.wishes for person in PEOPLE]
        return run_server(new_folder(self.out / "server"), *self.flags, people=people)

    async def _teach(self, wish: EvalWish, server: RunningServer) -> WishOutcome:
        async with opened(Chat(server.url, key=server.keys[owner(wish, person)]) for person in PEOPLE) as chats:
            people = dict(zip(PEOPLE, chats, strict=True))
            return await WishMeasurement(wish, server, people, self.plan, self.progress.note).run()

    async def _practise(self, wish: EvalWish, _: None) -> WishOutcome:
        self.progress.note(f"{wish.name}: starting a server")
        taught = new_folder(self.out / wish.name)
        async with run_server(taught, *self.flags) as server, Chat(server.url) as chat:
            measured = WishMeasurement(wish, server, dict.fromkeys(PEOPLE, chat), self.plan, self.progress.note)
            await measured.teach()
            if not self.own:
                return await measured.practise()
        self.progress.note(f"{wish.name}: starting a server that learns")
        learns = run_server(taught.with_name(f"{taught.name}-own"), *self.own, "--continue-from", str(taught))
        async with learns as server, Chat(server.url) as chat:
            measured.move(server, chat)
            return await measured.practise()


def owner(wish: EvalWish, person: str) -> str:
    return f"{wish.name}.{person}"


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
