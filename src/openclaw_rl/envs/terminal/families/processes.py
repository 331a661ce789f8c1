"""Tasks with processes. Each process holds the lock of a file, such as NAME.lock, for as long as it lives.

The files exist when an attempt begins, and the checks test the locks on these very files. So a file that is deleted,
copied or renamed does not change what a check sees.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from openclaw_rl.envs.terminal.families.draft import Generator, TerminalDraft, joined, lines, names, others

#: How long a worker would live; it ends with the attempt.
WORKER_SECONDS = 3600


def start_workers(workers: Sequence[str]) -> str:
    """Commands that start workers and write their process ids to NAME.pid."""
    # The worker inherits the lock, so it holds it from its first moment.
    start = f"exec 8>$name.lock; flock 8; sleep {WORKER_SECONDS} >/dev/null 2>&1 & echo $! > $name.pid; exec 8>&-"
    return f"for name in {' '.join(workers)}; do {start}; done"


def script_of(lock: str) -> dict[str, Any]:
    """A program that takes a lock, writes its process id into the locked file and becomes a worker."""
    # It waits, because the lock may be tested at the same moment.
    body = f"#!/bin/sh\nexec 8>>{lock}\nflock -w 2 8 || exit 1\necho $$ > {lock}\nexec sleep {WORKER_SECONDS}\n"
    return {"text": body, "mode": 0o755}


def runs(name: str, *, before: bool, lock: str = "", mode: str = "", pid: str = "") -> dict[str, Any]:
    """A check that a process runs; with `pid`, that the file of this name has its id."""
    about = f"The process {name} must run at the end{mode}"
    about += f", and {pid} must have its id" if pid else ""
    return {"lock": lock or f"{name}.lock", "held": True, "pid": pid, "about": about, "kept": before}


def is_gone(name: str, lock: str = "", mode: str = "") -> dict[str, Any]:
    about = f"The process {name}{mode} must not run at the end"
    return {"lock": lock or f"{name}.lock", "held": False, "about": about, "kept": False}


def end_by_id(random: Random) -> TerminalDraft:
    name, other = names(random, 2)
    question = f"End the process whose id is in {name}.pid."
    solution = f"kill $(cat {name}.pid)"
    files = others(random, name, other)
    return TerminalDraft(
        question, solution, files, {}, start_workers([name, other]), [is_gone(name), runs(other, before=True)]
    )


def start_script(random: Random) -> TerminalDraft:
    (name,) = names(random, 1)
    lock = f"{name}.lock"
    files = {f"{name}.sh": script_of(lock), lock: "", **others(random, name)}
    question = f"Start ./{name}.sh in the background."
    checks = [runs(name, before=False)]
    return TerminalDraft(question, f"./{name}.sh &", files, {lock: {"any": True}}, checks=checks)


def end_all_but(random: Random) -> TerminalDraft:
    workers = names(random, 4)
    kept = random.choice(workers)
    question = f"Some processes run; the id of each is in a file NAME.pid. End all of them but {kept}."
    solution = f'for f in *.pid; do [ "$f" = {kept}.pid ] || kill $(cat "$f"); done'
    checks = [runs(worker, before=True) if worker == kept else is_gone(worker) for worker in workers]
    return TerminalDraft(question, solution, others(random, *workers), {}, start_workers(workers), checks)


def start_with_variable(random: Random) -> TerminalDraft:
    name, value, other = names(random, 3)
    lock = f"{name}.{value}.lock"
    files = {f"{name}.sh": script_of(f"{name}.$MODE.lock"), lock: "", f"{name}.{other}.lock": ""}
    question = f"Start ./{name}.sh in the background, with the environment variable MODE set to {value}."
    checks = [runs(name, before=False, lock=lock, mode=f" with MODE={value}")]
    files |= others(random, name, value, other)
    return TerminalDraft(question, f"MODE={value} ./{name}.sh &", files, {lock: {"any": True}}, checks=checks)


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
    name, old, value = names(random, 3)
    old_lock = f"{name}.{old}.lock"
    lock = f"{name}.{value}.lock"
    pid = f"{name}.pid"
    files = {f"{name}.sh": script_of(f"{name}.$MODE.lock"), old_lock: "", lock: "", **others(random, name, old, value)}
    # The script has the lock when its id is in the file.
    setup = f"MODE={old} ./{name}.sh & echo $! > {pid}; until [ -s {old_lock} ]; do sleep 0.02; done"
    question = (
        f"./{name}.sh runs, and its process id is in {pid}. End it, start it again in the background with the "
        f"environment variable MODE set to {value}, and write its new id to {pid}."
    )
    solution = f"kill $(cat {pid}); MODE={value} ./{name}.sh & echo $! > {pid}"
    checks = [
        is_gone(name, old_lock, f" with MODE={old}"),
        runs(name, before=False, lock=lock, mode=f" with MODE={value}", pid=pid),
    ]
    changes = {lock: {"any": True}, pid: {"any": True}}
    return TerminalDraft(question, solution, files, changes, setup, checks)


LEVELS: dict[int, tuple[Generator, ...]] = {
    1: (end_by_id, start_script),
    2: (end_all_but, start_with_variable),
    3: (end_the_stuck, restart),
}
