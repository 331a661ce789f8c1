"""The disk is full for a while, again and again: people are served, and what was acknowledged before is kept."""

import random
import subprocess
import time
from pathlib import Path

import httpx

from chaos.learning import (
    ENDLESS,
    FAST,
    LEARN,
    all_trained,
    check_ledger,
    healthy,
    learning_server,
    rows,
    states,
    teach,
)
from chaos.report import Report, Setting
from support.process_stats import memory_mib
from support.server_program import SERVE, Program, until
from support.small_disk import SmallDisk, small_disk

ROUNDS = 10
FULL_SECONDS = 3.0
#: The longest that a server may take to refuse its start.
START_SECONDS = 60


def run(report: Report, setting: Setting) -> None:
    draw = random.Random(setting.seed)
    with small_disk(setting.folder) as disk:
        run_dir, received = disk.folder / "run", set[str]()
        with learning_server(setting.model, run_dir) as program:
            before = memory_mib(program.process.pid)
            for _ in range(setting.times(ROUNDS)):
                received.update(teach(program, 4))
                time.sleep(draw.uniform(0, 1))
                while_full(report, program, disk)
                received.update(recovered(report, program, run_dir))
            until(lambda: all_trained(run_dir), program)
            report.memory = (before, memory_mib(program.process.pid))
            program.process.terminate()
            report.check(program.process.wait(60) == 0, "the server did not stop in order")
            report.check_log(program.log)
        check_ledger(report, run_dir)
        recorded = {id for (id,) in rows(run_dir, "SELECT completion FROM turns")}
        report.check(
            received <= recorded, "an acknowledged turn was lost", f"{len(received - recorded)} of {len(received)}"
        )
        report.count("trained turns", states(run_dir)["applied"])
        if disk.kind == "small file system":
            start_on_full_disk(report, setting.model, disk)


def while_full(report: Report, program: Program, disk: SmallDisk) -> None:
    """Fill the disk, talk, and free it."""
    report.count(f"{disk.kind} filled")
    disk.fill(program.process.pid)
    try:
        end = time.monotonic() + FULL_SECONDS
        while time.monotonic() < end:
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
            answer = httpx.post(f"{program.url}/v1/chat/completions", json=body, timeout=30)
            report.count("answered while full")
            report.check(answer.status_code == 200, "not served while the disk was full", answer.text[:200])
            rating = {"id": "chatcmpl-none", "score": 1}
            status = httpx.post(f"{program.url}/v1/feedback", json=rating, timeout=30).status_code
            report.check(status in (404, 503), "odd answer to feedback while the disk was full", str(status))
            report.check(healthy(program), "/healthz was slow while the disk was full")
            time.sleep(0.2)
    finally:
        disk.free(program.process.pid)


def recovered(report: Report, program: Program, run_dir: Path) -> list[str]:
    """Wait until turns are recorded again; returns the ids of answers that were rated then."""

    def records() -> bool:
        count = rows(run_dir, "SELECT count(*) FROM turns")
        httpx.post(
            f"{program.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]}, timeout=30
        )
        return rows(run_dir, "SELECT count(*) FROM turns") > count

    until(records, program)
    ids = teach(program, 2)
    until(lambda: all_trained(run_dir), program)
    return ids


def start_on_full_disk(report: Report, model: Path, disk: SmallDisk) -> None:
    """A start without room ends with one sentence."""
    disk.fill(0)
    line = [*SERVE, "--model-name", str(model), "--run-dir", str(disk.folder / "new"), "--proxy-port", "0"]
    try:
        done = subprocess.run(
            [*line, *LEARN, *FAST, *ENDLESS], capture_output=True, text=True, check=False, timeout=START_SECONDS
        )
        report.check(done.returncode == 2, "a start on a full disk did not end with status 2", str(done.returncode))
        report.check_log(done.stderr)
    except subprocess.TimeoutExpired:
        report.fail("a start on a full disk did not end")
    finally:
        disk.free(0)
