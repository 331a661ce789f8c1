"""kill -9 of the whole server at random instants while it serves and learns, round after round on one run directory."""

import contextlib
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from chaos.learning import (
    ENDLESS,
    FAST,
    LEARN,
    all_trained,
    check_ledger,
    learning_server,
    rows,
    states,
    teach,
    version,
)
from chaos.report import Report, Setting
from openclaw_rl.ledger.schema import FILE
from support.conversations import assert_recorded, talk
from support.process_stats import memory_mib
from support.server_program import SERVE, Program, starting, until

ROUNDS = 100
TALKERS = 3
#: In one round of so many the server is killed while it starts.
EARLY_EVERY = 7
#: The latest instant of a kill, in seconds after the beginning of the load.
MAX_SECONDS = 2.0


def run(report: Report, setting: Setting) -> None:
    run_dir = setting.folder / "run"
    draw, received = random.Random(setting.seed), dict[str, str]()
    served = 0
    for number in range(setting.times(ROUNDS, least=2)):
        report.count("kills")
        if number % EARLY_EVERY == EARLY_EVERY - 1:
            kill_while_starting(setting.model, run_dir, draw)
        else:
            served = one_round(report, setting.model, run_dir, draw, received, served)
        check_ledger(report, run_dir)
    try:
        assert_recorded(run_dir / FILE, received)
    except AssertionError as error:
        report.fail("an acknowledged turn was lost", str(error))
    finish(report, setting.model, run_dir)
    report.count("acknowledged turns", len(received))
    report.count("trained turns", states(run_dir)["applied"])
    report.count("steps", rows(run_dir, "SELECT count(*) FROM updates WHERE outcome = 'applied'")[0][0])


def one_round(
    report: Report, model: Path, run_dir: Path, draw: random.Random, received: dict[str, str], served: int
) -> int:
    """Load, and a kill in its midst; returns the newest policy version that answered."""
    with learning_server(model, run_dir) as program, ThreadPoolExecutor(TALKERS + 1) as pool:
        newest = version(program)
        report.check(newest >= served, "an older policy served after a kill", f"policy {newest} after policy {served}")
        remember_memory(report, program)
        stop = threading.Event()
        seeds = [draw.random() for _ in range(TALKERS)]
        clients = [pool.submit(talk, program.url, seed, received, stop) for seed in seeds]
        clients.append(pool.submit(teach_until, program, stop))
        try:
            time.sleep(draw.uniform(0.1, MAX_SECONDS))
            with contextlib.suppress(httpx.HTTPError, AssertionError):
                newest = version(program)
        finally:
            program.process.kill()
            stop.set()
        for client in clients:
            client.result()
        report.check_log(program.log)
    return newest


def teach_until(program: Program, stop: threading.Event) -> None:
    with contextlib.suppress(httpx.HTTPError, AssertionError, OSError):
        while not stop.is_set():
            teach(program, 2)


def kill_while_starting(model: Path, run_dir: Path, draw: random.Random) -> None:
    with starting(SERVE, model, "--run-dir", str(run_dir), *LEARN, *FAST, *ENDLESS) as program:
        time.sleep(draw.uniform(0, MAX_SECONDS))
        program.process.kill()


def finish(report: Report, model: Path, run_dir: Path) -> None:
    """A last start: everything judged is trained on, and the server stops in order."""
    with learning_server(model, run_dir) as program:
        try:
            until(lambda: all_trained(run_dir), program)
        except AssertionError as error:
            report.fail("judged turns were not trained on", f"{states(run_dir)} {error}")
        remember_memory(report, program)
        program.process.terminate()
        report.check(program.process.wait(60) == 0, "the server did not stop in order")
        report.check_log(program.log)
    check_ledger(report, run_dir)
    unfinished = list((run_dir / "policies").glob(".unfinished-*"))
    report.check(not unfinished, "unfinished policies were left behind", f"{len(unfinished)} of them")


def remember_memory(report: Report, program: Program) -> None:
    """Memory of the first server, and of this one."""
    now = memory_mib(program.process.pid)
    report.memory = (report.memory[0] if report.memory else now, now)
