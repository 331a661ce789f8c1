"""What the server says is wrapped on a terminal, and elsewhere one line each, to be searched."""

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from openclaw_rl.app.config import load
from openclaw_rl.app.console import banner
from openclaw_rl.terminal import SafeConsole, agrees, printable

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


HOSTILE = """
import logging
from openclaw_rl.app.server import start_logging
start_logging("info")
text = "lost: \\x1b[2J\\x1b]0;title\\x07 \\r\\n2026-11-15 00:00:00 INFO all is well \\x9b31m"
logging.getLogger("a").warning("A turn is %s", text)
try:
    raise ValueError(text)
except ValueError:
    logging.getLogger("a").exception("%s", text)
"""


def test_a_client_cannot_forge_lines_of_the_log_or_write_to_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    with log.open("w") as file:
        subprocess.run([sys.executable, "-c", HOSTILE], stderr=file, check=True)
    text = log.read_text()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f]", text)
    lines = text.splitlines()
    assert re.match(r"\S+ \S+ WARNING A turn is lost: .*all is well", lines[0])
    assert re.match(r"\S+ \S+ ERROR   lost: .*all is well", lines[1])
    assert lines[2].startswith("Traceback")


def test_a_client_s_text_in_the_log_changes_no_terminal() -> None:
    ours, its = pty.openpty()
    subprocess.run([sys.executable, "-c", HOSTILE], stderr=its, check=True, env={**os.environ, "COLUMNS": "200"})
    os.close(its)
    shown = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert "A turn is lost" in shown
    assert not re.search("\x1b\\[2J|\x1b\\]|\x07|\x9b", shown)


@given(st.text())
def test_a_console_prints_only_its_own_control_characters(text: str) -> None:
    out = io.StringIO()
    SafeConsole(file=out, force_terminal=True, color_system="standard", width=200).print(Text(text, style="red"))
    unstyled = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert printable(unstyled) == unstyled
    assert "\x1b" not in unstyled


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
    assert said["page"] == "open http://127.0.0.1:30000/ in a browser"
    assert "--preset personal" in said["settings"]
    banner(load({"preset": "personal"}, {}).config, "local", 0, 30000)
    assert "settings  preset personal" in capsys.readouterr().err


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.more), {"run_dir": "my runs/a"}])
def test_the_command_that_it_says_works_as_pasted_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: dict[str, str]
) -> None:
    folder = tmp_path / "a clone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    config = load(options, {}).config
    banner(config, "local", 0, 30000)
    _, _, after = capsys.readouterr().err.partition("another terminal:\n")
    bare = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    pasted = subprocess.run(after.splitlines()[0], shell=True, cwd="/", env=bare, capture_output=True, text=True)
    assert f"No server runs in {folder / config.run.run_dir}" in pasted.stderr


@pytest.mark.parametrize(
    ("typed", "means"), [("y\n", True), (" YES \n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_only_a_yes_is_an_agreement(monkeypatch: pytest.MonkeyPatch, typed: str, means: bool) -> None:
    """Ctrl-D ends the input, which is no yes."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(typed))
    assert agrees("Change it?") is means
