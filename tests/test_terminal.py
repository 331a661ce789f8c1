"""What the server says is wrapped on a terminal, and elsewhere one line each, to be searched."""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from openclaw_rl.app.banner import banner
from openclaw_rl.app.config import load

LONG = "step 12: " + "a word and " * 30 + "[the end]"
LOGS = f"""
import logging
from openclaw_rl.app.server import start_logging
start_logging("info")
logging.getLogger("a").info({LONG!r})
logging.getLogger("a").debug("not shown")
"""


def test_a_line_of_the_log_is_one_line_in_a_file(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("w") as file:
        # As a continuous integration asks for colours, which are no terminal.
        subprocess.run([sys.executable, "-c", LOGS], stderr=file, check=True, env={**os.environ, "FORCE_COLOR": "1"})
    (line,) = log.read_text().splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO +" + re.escape(LONG), line)


def test_a_line_of_the_log_is_wrapped_on_a_terminal() -> None:
    ours, its = pty.openpty()
    subprocess.run([sys.executable, "-c", LOGS], stderr=its, check=True, env={**os.environ, "COLUMNS": "80"})
    os.close(its)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", os.read(ours, 1 << 16).decode()).splitlines()
    os.close(ours)
    assert len(lines) > 3
    assert max(map(len, lines)) <= 80
    assert re.match(r"\d\d:\d\d:\d\d INFO +step 12:", lines[0])


def test_what_a_server_says_when_it_is_ready_is_a_line_each_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / ("a-long-name" * 20) / "[b]"
    banner(load({"run_dir": run_dir}, {}).config, "local", 0, 30000)
    lines = capsys.readouterr().err.splitlines()
    assert all(line == line.rstrip() for line in lines)
    said = {line[:10].strip(): line[10:] for line in lines}
    assert said["turns"] == f"recorded in {run_dir}"
    assert said["learning"].endswith(f"in {run_dir}")
    assert said["URL"] == "http://127.0.0.1:30000/v1"
