"""Bits of stored messages flip between two starts: only the turns with these messages are lost, and it is said."""

import contextlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import httpx

from chaos.learning import learning_server, rows, states
from chaos.report import Report, Setting
from openclaw_rl.ledger.schema import FILE, connect
from support.conversations import ask, rate
from support.server_program import SECONDS, until

#: Turns at full size. A third of them is damaged, and more of those than a server has judges.
TURNS = 300
#: How long a server is watched after it has met every damaged turn.
WATCHED_SECONDS = 5
#: What a server may log about each damaged turn.
MAX_LOG_BYTES = 2_000
#: Commands that read all turns: (arguments, exit status).
COMMANDS = ((("sessions",), 0), (("export", os.devnull), 1), (("status",), 0), (("report", "--no-answers"), 0))


def run(report: Report, setting: Setting) -> None:
    run_dir = setting.folder / "run"
    count = setting.times(TURNS, least=24)
    with learning_server(setting.model, run_dir) as program:
        words = [f"question number {number:04d} of its own" for number in range(count)]
        ids = [ask(program.url, messages=[{"role": "user", "content": said}])["id"] for said in words]
        program.process.terminate()
        program.process.wait(SECONDS)
    damaged = random.Random(setting.seed).sample(range(count), count // 3)
    spoil(run_dir / FILE, [words[number] for number in damaged], random.Random(setting.seed))
    report.count("turns", count)
    report.count("damaged turns", len(damaged))
    with learning_server(setting.model, run_dir) as program:
        for number, id in enumerate(ids):
            rate(program.url, id, 1 if number % 2 else -1)
        until(lambda: states(run_dir)["ready"] + states(run_dir)["judged"] < 2, program)
        time.sleep(WATCHED_SECONDS)
        for number in (damaged[0], next(number for number in range(count) if number not in damaged)):
            status = httpx.get(f"{program.url}/v1/responses/{ids[number]}", timeout=SECONDS).status_code
            expected = 410 if number in damaged else 200
            report.check(status == expected, "a response has another status than expected", f"{status}, not {expected}")
        ask(program.url)
        report.most("KiB of log", len(program.log) // 1024)
        report.check(len(program.log) < 20_000 + MAX_LOG_BYTES * len(damaged), "the log is flooded", program.log[-400:])
        report.check("Traceback" not in program.log, "a damaged turn gives a traceback", program.log[-400:])
    reasons = rows(run_dir, "SELECT number FROM turns WHERE state = 'dropped' AND reason LIKE 'damaged: %'")
    report.check({number - 1 for (number,) in reasons} == set(damaged), "other turns were dropped", f"{reasons}")
    trained = states(run_dir)["applied"]
    report.check(trained >= count - len(damaged) - 1, "whole turns were not trained on", f"{trained} of {count}")
    for arguments, expected in COMMANDS:
        line = [sys.executable, "-m", "openclaw_rl", *arguments, "--run-dir", str(run_dir)]
        done = subprocess.run(line, capture_output=True, check=False, timeout=SECONDS)
        where = f"{arguments}: status {done.returncode}, {done.stderr.decode()[-400:]}"
        report.check(done.returncode == expected, "a command does not deal with damaged turns", where)


def spoil(path: Path, words: list[str], draw: random.Random) -> None:
    """Flip one bit of each of these messages, wherever the file has them."""
    with contextlib.closing(connect(path)) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = bytearray(path.read_bytes())
    for said in words:
        place = content.index(said.encode())
        content[place + draw.randrange(len(said))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)
