"""The skill's commands are run as they are written, in a run directory of their own."""

import io
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openclaw_rl.cli import build_parser, main
from openclaw_rl.ledger.run_dir import RunDirLock
from support.harness import Bench, running
from support.records import Book, a_turn

ROOT = Path(__file__).parent.parent
SKILL = ROOT / "skills" / "openclaw-rl-training" / "SKILL.md"
LINES = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", SKILL.read_text(), re.DOTALL)
    for line in block.splitlines()
]
COMMANDS = [shlex.split(line)[1:] for line in LINES if line.startswith("openclaw-rl ")]
#: These take minutes or need a larger model, and have tests of their own: here their arguments are checked.
LONG = ("serve", "rollout", "eval", "rejudge")
#: What they end with here: there is no checkpoint to report on, and no learner to roll back.
STATUS = {"rollback": 2, "report": 2}


def test_every_line_is_a_command() -> None:
    assert {line.split()[0] for line in LINES} == {"make", "openclaw-rl"}
    targets = [line.split()[1] for line in LINES if line.startswith("make ")]
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Bench]:
    with running(Bench(tiny_model)) as bench:
        yield bench


@pytest.fixture
def folder(server: Bench, book: Book, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a run in runs/default, whose server runs."""
    book.capture(a_turn("s-0"))
    book.close()
    work = tmp_path / "work"
    (work / "runs").mkdir(parents=True)
    book.folder.rename(work / "runs" / "default")
    (work / "examples").symlink_to(ROOT / "examples")
    for name, value in {"HOME": str(tmp_path), "RUN_DIR": "", "SGLANG_API_KEY": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(work)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello.\n"))
    lock = RunDirLock(Path("runs/default"))
    lock.tell(server.url)
    yield work
    lock.close()


def test_every_command_is_run_as_it_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in COMMANDS:
        if arguments == ["--version"]:
            with pytest.raises(SystemExit):
                main(arguments)
        elif arguments[0] in LONG and "--dry-run" not in arguments:
            assert build_parser().parse_args(arguments).run is not None
        else:
            status = main(arguments)
            said = capsys.readouterr()
            assert status in (0, STATUS.get(arguments[0], 0)), (arguments, said.err)
    assert (folder / "turns.jsonl").is_file()
