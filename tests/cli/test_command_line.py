"""What all commands have in common: one sentence for every mistake, never a traceback, and a fast start."""

import subprocess
import sys
from pathlib import Path

import pytest

from openclaw_rl.cli import build_parser, main
from openclaw_rl.ledger.schema import FILE
from support.commands import Program


@pytest.mark.parametrize("command", [("sessions",), ("checkpoints",), ("forget", "--session", "x")])
def test_without_a_ledger_commands_say_so_and_make_none(
    folder: Path, program: Program, command: tuple[str, ...]
) -> None:
    code, _out, err = program(*command)
    assert code == 2
    assert f"There is no ledger in {folder}" in err
    assert not folder.exists()


def test_a_file_that_is_no_ledger_is_said_in_a_sentence(folder: Path, program: Program) -> None:
    folder.mkdir()
    (folder / FILE).write_text("this is no database, whatever its name says " * 50)
    for command in (("status",), ("sessions",), ("forget", "--session", "x")):
        code, _out, err = program(*command)
        assert code == 2
        assert str(folder) in err
        assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [("export", "a.jsonl", "too-much"), ("status", "too-much")])
def test_an_unexpected_argument_is_named(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(list(arguments)) == 2
    expected = f"openclaw-rl: Unexpected argument: too-much. See openclaw-rl {arguments[0]} --help.\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--api-key", "alice=S3", "S3CRET"),
        ("serve", "--api-key=alice =", "S3CRET"),
        ("chat", "--api-k", "S3", "S3CRET"),
        ("serve", "--api_key", "S3CRET"),
        ("serve", "--apikey=S3CRET"),
    ],
)
def test_an_argument_that_may_be_a_secret_is_not_shown(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(list(arguments)) == 2
    said = capsys.readouterr()
    assert "S3CRET" not in said.out + said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    "command", [("demo",), ("wishes",), ("wishes", "pirate"), ("benchmark", "--baseline", "bare"), ("rollout",)]
)
@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (("--xyzzy",), "There is no option --xyzzy. See openclaw-rl serve --help."),
        (("--batch-siz", "4"), "There is no option --batch-siz; did you mean --batch-size?"),
        (("--batch-size", "many"), "--batch-size 'many' (from flag) is not valid: it must be a whole number."),
        (("--batch-size",), "Argument --batch-size: expected one argument. See openclaw-rl serve --help."),
    ],
)
def test_an_option_that_the_server_would_refuse_is_refused_before_anything_starts(
    command: tuple[str, ...],
    option: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command, "--", *option]) == 2
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", f"openclaw-rl: {problem}\n")
    assert not any(tmp_path.iterdir())


def test_help_fits_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in (name for module in build_parser()._actions if module.choices for name in module.choices):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        # The choices of a flag are one word.
        told = capsys.readouterr().out.splitlines()
        shown = [line for line in told if not line.startswith("  -") or "|" not in line]
        assert max(map(len, shown)) <= 80, command


def test_help_loads_nothing_heavy() -> None:
    code = """
import contextlib, sys
from openclaw_rl.cli import main
with contextlib.suppress(SystemExit):
    main(["--help"])
print([name for name in ("torch", "transformers", "httpx", "fastapi") if name in sys.modules])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "show this help message" in shown
    assert shown.splitlines()[-1] == "[]"


def test_a_server_and_its_worker_start_without_the_imports_that_take_longest(tiny_model: Path) -> None:
    code = f"""
import sys
from pathlib import Path
from openclaw_rl.app import server
from openclaw_rl.rendering.chat import ChatRenderer
model = Path({str(tiny_model)!r})
renderer = ChatRenderer(model)
renderer.text([{{"role": "user", "content": "Hello"}}])
print("torch" in sys.modules)
import torch
from openclaw_rl.engines.local.process import sampler_worker
sampler_worker.load_language_model(model, torch.float32, torch.device("cpu"))
print([name for name in ("transformers", "torch._dynamo") if name in sys.modules])
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.splitlines() == ["False", "[]"]


def test_a_process_that_stops_with_its_input_can_end_before_it() -> None:
    code = """
import threading, time
from openclaw_rl.cli.serve import stop_with_input
threading.Thread(target=stop_with_input, daemon=True).start()
time.sleep(0.3)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with process:
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
