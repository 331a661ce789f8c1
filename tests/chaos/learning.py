"""A server that learns with a tiny model, as several scenarios need it, and the checks on its ledger."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from chaos.report import Report
from openclaw_rl.ledger.schema import FILE, connect
from support.conversations import ask, rate
from support.server_program import SERVE, Program, serving

LEARN = ("--method", "rl", "--judge", "feedback", "--batch-size", "2", "--save-interval", "3", "--lora-rank", "4")
FAST = ("--learning-rate", "1e-3", "--max-kl", "100", "--kv-cache-gib", "0.1", "--max-staleness", "100000")
ENDLESS = ("--max-steps", "1000000")
#: States of a turn from which learning still goes on.
UNFINISHED = ("ready", "judged", "batched")
TRAINED = "SELECT turn FROM update_turns JOIN updates USING (number) WHERE outcome = 'applied'"


@contextlib.contextmanager
def learning_server(model: Path, run_dir: Path, *flags: str) -> Iterator[Program]:
    with serving(SERVE, model, "--run-dir", str(run_dir), *LEARN, *FAST, *ENDLESS, *flags) as program:
        yield program


def teach(program: Program, count: int) -> list[str]:
    """Ask and rate the answers; returns their ids."""
    ids = []
    for number in range(count):
        ids.append(ask(program.url)["id"])
        rate(program.url, ids[-1], 1 if number % 2 else -1)
    return ids


def version(program: Program) -> int:
    """The policy version that serves."""
    return int(ask(program.url, store=False)["system_fingerprint"].removeprefix("policy-"))


def rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(connect(run_dir / FILE, readonly=True)) as db:
        return [tuple(row) for row in db.execute(query)]


def states(run_dir: Path) -> Counter[str]:
    return Counter(state for (state,) in rows(run_dir, "SELECT state FROM turns"))


def all_trained(run_dir: Path) -> bool:
    """Whether fewer turns than a batch wait for the judge or for a step."""
    return sum(states(run_dir)[state] for state in UNFINISHED) < 2


def check_ledger(report: Report, run_dir: Path) -> None:
    """The ledger is whole, and no turn counts twice."""
    report.check(rows(run_dir, "PRAGMA integrity_check") == [("ok",)], "the ledger is damaged")
    turns = [turn for (turn,) in rows(run_dir, TRAINED)]
    twice = [turn for turn, times in Counter(turns).items() if times > 1]
    report.check(not twice, "a turn was trained on twice", f"turns {twice}")
    marked = {turn for (turn,) in rows(run_dir, "SELECT number FROM turns WHERE state = 'applied'")}
    report.check(marked == set(turns), "turns and steps disagree", f"{sorted(marked ^ set(turns))}")
    outcomes = Counter(outcome for (outcome,) in rows(run_dir, "SELECT outcome FROM updates"))
    report.check(not outcomes["quarantined"], "a batch was set aside", f"{outcomes}")


def healthy(program: Program) -> bool:
    """Whether /healthz answers within two seconds."""
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{program.url}/healthz", timeout=2).status_code == 200
    return False
