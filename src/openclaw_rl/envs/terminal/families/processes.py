"""Tasks with processes. A worker is a process that holds the lock of NAME.lock for as long as it lives."""

from collections.abc import Sequence
from random import Random
from typing import Any

from openclaw_rl.envs.terminal.families.draft import Generator, TerminalDraft, joined, lines, names, others

#: How long a worker would live; it ends with the attempt.
WORKER_SECONDS = 3600


def start_workers(workers: Sequence[str]) -> str:
    """Commands that start workers and write their process ids to NAME.pid."""
    one = f"(flock -n 8 && exec sleep {WORKER_SECONDS}) 8>$name.lock >/dev/null 2>&1 & echo $! > $name.pid"
    return f"for name in {' '.join(workers)}; do {one}; done; sleep 0.1"


def script_of(name: str, more: str = "") -> dict[str, Any]:
    """A program that becomes a worker."""
    body = f"#!/bin/sh\n{more}exec 8>>{name}.lock\nflock -n 8 && exec sleep {WORKER_SECONDS}\n"
    return {"text": body, "mode": 0o755}


def runs(name: str, *, before: bool) -> dict[str, Any]:
    return {"lock": f"{name}.lock", "held": True, "about": f"{name} must run at the end", "kept": before}


def is_gone(name: str) -> dict[str, Any]:
    return {"lock": f"{name}.lock", "held": False, "about": f"{name} must not run at the end", "kept": False}


def end_by_id(random: Random) -> TerminalDraft:
    name, other = names(random, 2)
    question, solution = f"End the process whose id is in {name}.pid.", f"kill $(cat {name}.pid)"
    files = others(random, name, other)
    return TerminalDraft(
        question, solution, files, {}, start_workers([name, other]), [is_gone(name), runs(other, before=True)]
    )


def start_script(random: Random) -> TerminalDraft:
    (name,) = names(random, 1)
    files = {f"{name}.sh": script_of(name), **others(random, name)}
    changes = {f"{name}.lock": {"any": True}}
    question = f"Start ./{name}.sh in the background."
    return TerminalDraft(question, f"./{name}.sh &", files, changes, checks=[runs(name, before=False)])


def end_all_but(random: Random) -> TerminalDraft:
    workers = names(random, 4)
    kept = random.choice(workers)
    question = f"Some processes run; the id of each is in a file NAME.pid. End all of them but {kept}."
    solution = f'for f in *.pid; do [ "$f" = {kept}.pid ] || kill $(cat "$f"); done'
    checks = [runs(worker, before=True) if worker == kept else is_gone(worker) for worker in workers]
    return TerminalDraft(question, solution, others(random, *workers), {}, start_workers(workers), checks)


def start_with_variable(random: Random) -> TerminalDraft:
    name, value, mode = names(random, 3)
    files = {f"{name}.sh": script_of(name, f'echo "$MODE" > {mode}.txt\n'), **others(random, name, mode)}
    changes = {f"{mode}.txt": value, f"{name}.lock": {"any": True}}
    question = f"Start ./{name}.sh in the background, with the environment variable MODE set to {value}."
    checks = [runs(name, before=False)]
    return TerminalDraft(question, f"MODE={value} ./{name}.sh &", files, changes, checks=checks)


def end_the_stuck(random: Random) -> TerminalDraft:
    workers = names(random, 5)
    stuck = set(random.sample(workers, 2))
    logs = {
        f"{worker}.log": joined([*lines(random, 3), *(["state: stuck"] if worker in stuck else [])])
        for worker in workers
    }
    question = (
        "Some processes run; NAME.pid has the id of each and NAME.log its log. End those whose log has a line with "
        "stuck, and no others."
    )
    solution = 'for f in $(grep -l stuck *.log); do kill $(cat "${f%.log}.pid"); done'
    checks = [is_gone(worker) if worker in stuck else runs(worker, before=True) for worker in workers]
    files = {**logs, **others(random, *workers)}
    return TerminalDraft(question, solution, files, {}, start_workers(workers), checks, key=" ".join(sorted(stuck)))


def restart(random: Random) -> TerminalDraft:
    name, mode, value = names(random, 3)
    files = {f"{name}.sh": script_of(name, f'echo "$MODE" > {mode}.txt\n'), **others(random, name, mode)}
    setup = f"MODE=old ./{name}.sh & echo $! > {name}.pid; sleep 0.2"
    question = (
        f"./{name}.sh runs, and its process id is in {name}.pid. Start it anew with the environment variable "
        f"MODE set to {value}, in the background, and write its new id to {name}.pid. It runs only once at a time."
    )
    solution = f"kill $(cat {name}.pid); sleep 0.2; MODE={value} ./{name}.sh & echo $! > {name}.pid"
    changes = {f"{mode}.txt": value, f"{name}.pid": {"any": True}}
    return TerminalDraft(question, solution, files, changes, setup, [runs(name, before=True)])


LEVELS: dict[int, tuple[Generator, ...]] = {
    1: (end_by_id, start_script),
    2: (end_all_but, start_with_variable),
    3: (end_the_stuck, restart),
}
