"""Measures whether two people with opposite wishes both get what they want: alone, on one line, on lines of their own.

    python benchmarks/team.py [--seed 0] [--mode all] [--sessions 40] [--minutes 8] [-- further options of the server]

Each mode runs a real server with the embedded model, or the one in BENCH_MODEL. Simulated people (`brief` and
`teaching-assistant`) talk to it at the same time, and are examined before and after with questions that nobody asked,
without notes. `alone` has a server for each of them, `shared` one line for both, `lines` a line for each.
A mode takes at most --minutes and a few more for the examinations; `alone` twice that.
"""

import argparse
import asyncio
import tempfile
from pathlib import Path

from common import MODEL, machine, sized, table, verdict

from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.personas.persona import load
from openclaw_rl.evals.trial import Exam, Trial, TrialOutcome, TrialPlan
from openclaw_rl.lab.server import RunningServer, run_server

PEOPLE = ("brief", "teaching-assistant")
MODES = ("alone", "shared", "lines")
#: Of what they reach alone, what people reach at least on lines of their own.
LEAST_SHARE = 0.9
METHOD = "notes+combine"


class Quiet:
    """Says only what was found in examinations."""

    def starting(self, plan: TrialPlan) -> None: ...
    def started(self, plan: TrialPlan) -> None: ...
    def talking(self, outcome: TrialOutcome, seconds: float, state: str) -> None: ...
    def examining(self, outcome: TrialOutcome, seconds: float, done: int, total: int) -> None: ...

    def examined(self, outcome: TrialOutcome, exam: Exam) -> None:
        print(f"  {outcome.plan.persona.name}: policy {exam.version}, {exam.adherence:.2f}", flush=True)


async def run_mode(mode: str, people: tuple[str, ...], given: argparse.Namespace, folder: Path) -> list[TrialOutcome]:
    """All people at once on one server; what became of each."""
    keys = {name: f"sk-{number}-{name}" for number, name in enumerate(people)}
    plans = [
        TrialPlan(METHOD, load(name), given.seed, folder, given.sessions, given.minutes, exam_every=1000)
        for name in people
    ]
    preset = ("--preset", "team" if mode == "lines" else "personal")
    shared = ("--distil-personal",) if mode == "shared" else ()
    named = ",".join(f"{name}={key}" for name, key in keys.items())
    flags = [*preset, *shared, "--no-practice", "--judge", "feedback", "--seed", str(given.seed), "--api-key", named]
    flags += ["--admin-key", "sk-admin", "--proxy-host", "127.0.0.1", *(["--model-name", MODEL] if MODEL else [])]
    outcomes = [TrialOutcome(plan) for plan in plans]
    async with run_server(folder, *flags, *given.flags) as server, asyncio.TaskGroup() as tasks:
        for outcome, (name, key) in zip(outcomes, keys.items(), strict=True):
            tasks.create_task(talk(outcome, name, key, server.url, folder))
    return outcomes


async def talk(outcome: TrialOutcome, name: str, key: str, url: str, folder: Path) -> None:
    async with Chat(url, key=key, local=True) as chat:
        await Trial(outcome, RunningServer(url, folder, key), chat, Quiet()).run()


async def measure(given: argparse.Namespace) -> dict[tuple[str, str], TrialOutcome]:
    found: dict[tuple[str, str], TrialOutcome] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for mode in MODES if given.mode == "all" else (given.mode,):
            groups = [(name,) for name in PEOPLE] if mode == "alone" else [PEOPLE]
            for number, people in enumerate(groups):
                print(f"{mode}: {', '.join(people)}", flush=True)
                for outcome in await run_mode(mode, people, given, Path(scratch) / f"{mode}-{number}"):
                    found[mode, outcome.plan.persona.name] = outcome
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mode", choices=("all", *MODES), default="all")
    parser.add_argument("--sessions", type=int, default=sized(40, 2))
    parser.add_argument("--minutes", type=float, default=sized(8.0, 0.2))
    parser.add_argument("flags", nargs="*", help="further options of the server, after --")
    given = parser.parse_args()
    found = asyncio.run(measure(given))
    rows = []
    for (mode, name), outcome in found.items():
        first, last = outcome.exams[0].adherence, outcome.exams[-1].adherence
        alone = found.get(("alone", name))
        share = last / max(alone.exams[-1].adherence, 1e-9) if alone and mode == "lines" else None
        said = "" if share is None else f"{share:.2f} of alone, {verdict(share, LEAST_SHARE)}"
        rows.append((mode, name, f"{first:.2f}", f"{last:.2f}", outcome.exams[-1].version, len(outcome.sessions), said))
    head = ("mode", "person", "before", "after", "policy", "sessions", "")
    table(f"Answers as each person wants them, without notes, seed {given.seed} ({machine()})", head, rows)


if __name__ == "__main__":
    main()
