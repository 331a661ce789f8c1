"""A run is readable by its owner alone."""

import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from openclaw_rl.ledger.run_dir import RunDirLock, make_private
from openclaw_rl.ledger.schema import open_ledger
from support.records import Book, a_turn


def readable_by_others(folder: Path) -> list[str]:
    paths = [folder, *folder.rglob("*")]
    return [str(path) for path in paths if stat.S_IMODE(path.lstat().st_mode) & 0o077]


@pytest.fixture
def open_run(tmp_path: Path) -> Path:
    """The directory of an older run, which everybody on the machine can read and change."""
    folder = tmp_path / "run"
    before = os.umask(0)
    try:
        book = Book(folder)
        book.capture(a_turn())
        book.close()
        files = ("options.toml", "metrics.jsonl", "evaluations.jsonl", "screenshots/a/000.png")
        for name in (*files, "checkpoints/step-000001-v1/learner.json"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("{}")
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o777 if path.is_dir() else 0o666)
    finally:
        os.umask(before)
    return folder


def test_a_server_takes_other_users_access_from_a_run_that_exists(open_run: Path) -> None:
    RunDirLock(open_run).close()
    assert readable_by_others(open_run) == []
    assert stat.S_IMODE(open_run.stat().st_mode) == 0o700
    assert stat.S_IMODE((open_run / "ledger.sqlite").stat().st_mode) == 0o600


def test_a_command_about_a_run_does_so_too(open_run: Path) -> None:
    with open_ledger(open_run):
        pass
    assert readable_by_others(open_run) == []


def test_a_ledger_s_write_ahead_log_is_as_private_as_the_ledger(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        book = Book(tmp_path)
        book.capture(a_turn())
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        book.close()
    finally:
        os.umask(before)
    assert set(modes) == {"ledger.sqlite", "ledger.sqlite-wal", "ledger.sqlite-shm"}
    assert set(modes.values()) == {0o600}


def test_files_that_are_not_a_run_s_stay_as_they_are(tmp_path: Path) -> None:
    notes, outside = tmp_path / "notes.txt", tmp_path / "outside.json"
    run = tmp_path / "run"
    run.mkdir()
    for path in (notes, outside, run / "mine.txt"):
        path.write_text("")
        path.chmod(0o644)
    (run / "metrics.jsonl").symlink_to(outside)
    make_private(run)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (notes, outside, run / "mine.txt")} == {0o644}
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    make_private(shared)
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777


def test_a_checkpoint_that_is_removed_meanwhile_does_not_matter(tmp_path: Path) -> None:
    ended = threading.Event()

    def write_and_remove() -> None:
        while not ended.is_set():
            for number in range(20):
                (tmp_path / "recovery" / str(number) / "learner").mkdir(parents=True)
            shutil.rmtree(tmp_path / "recovery")

    writer = threading.Thread(target=write_and_remove)
    writer.start()
    try:
        for _ in range(200):
            make_private(tmp_path)
    finally:
        ended.set()
        writer.join()
