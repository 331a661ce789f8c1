"""One server a run directory, and no trace of those that are gone."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openclaw_rl.config.options import ConfigError
from openclaw_rl.ledger.run_dir import SERVER_FILE, RunDirInUse, RunDirLock, check_usable, read_server

HOLD = """
import sys, time
from pathlib import Path
from openclaw_rl.ledger.run_dir import RunDirLock
lock = RunDirLock(Path(sys.argv[1]))
lock.tell("http://127.0.0.1:1234")
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the lock on `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_second_server_is_refused_and_told_the_first_one_s_process(
    tmp_path: Path, holder: subprocess.Popen[str]
) -> None:
    with pytest.raises(RunDirInUse, match=rf"process id {holder.pid}\b.*--run-dir") as refusal:
        RunDirLock(tmp_path)
    assert str(tmp_path) in str(refusal.value)
    # The refused one has changed nothing.
    assert read_server(tmp_path) == {"pid": holder.pid, "url": "http://127.0.0.1:1234"}


def test_a_killed_server_leaves_the_directory_free(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()
    assert read_server(tmp_path) == {}
    lock = RunDirLock(tmp_path)
    assert read_server(tmp_path) == {"pid": os.getpid(), "url": None}
    lock.close()


def test_another_directory_is_free(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    RunDirLock(tmp_path / "another" / "one").close()


def test_a_server_says_where_it_is_and_nothing_once_it_has_ended(tmp_path: Path) -> None:
    assert read_server(tmp_path) == {}
    lock = RunDirLock(tmp_path)
    lock.tell("http://127.0.0.1:30000")
    lock.tell("http://h:1")
    assert read_server(tmp_path) == {"pid": os.getpid(), "url": "http://h:1"}
    with pytest.raises(RunDirInUse, match=str(os.getpid())):
        RunDirLock(tmp_path)
    lock.close()
    assert read_server(tmp_path) == {}
    RunDirLock(tmp_path).close()


def test_what_a_dead_process_told_is_ignored(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    (tmp_path / SERVER_FILE).write_text(json.dumps({"pid": gone.pid, "url": "http://127.0.0.1:1234"}))
    assert read_server(tmp_path) == {}


def test_a_process_that_has_the_dead_server_s_number_is_not_the_server(tmp_path: Path) -> None:
    """Process ids come again, in containers after every start."""
    (tmp_path / SERVER_FILE).write_text(json.dumps({"pid": os.getpid(), "url": "http://127.0.0.1:1234"}))
    assert read_server(tmp_path) == {}


def test_looking_for_a_server_does_not_keep_one_from_starting(tmp_path: Path) -> None:
    for _ in range(20):
        assert read_server(tmp_path) == {}
        lock = RunDirLock(tmp_path)
        assert read_server(tmp_path)["pid"] == os.getpid()
        lock.close()


@pytest.mark.parametrize(
    "content", ["", "{", "null", "[]", "{}", '{"url": "x"}', '{"pid": "x"}', "\udcff", "[" * 100_000]
)
def test_a_file_that_says_nothing_of_use_is_no_server(tmp_path: Path, content: str) -> None:
    (tmp_path / SERVER_FILE).write_bytes(content.encode("utf-8", "surrogateescape"))
    assert read_server(tmp_path) == {}
    RunDirLock(tmp_path).close()


def test_a_refusal_names_the_option_that_chose_the_directory(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(RunDirInUse, match=r"another --rl-buffer-dir\."):
        RunDirLock(tmp_path, "--rl-buffer-dir")


def test_a_directory_that_cannot_be_used_is_said_with_the_option(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "under", Path("/proc/x")):
        for use in (RunDirLock, check_usable):
            with pytest.raises(ConfigError, match=rf"{folder} cannot be used: .*--some-dir"):
                use(folder, "--some-dir")


def test_a_lock_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / SERVER_FILE).mkdir()
    with pytest.raises(ConfigError, match=r"cannot be used: Is a directory.*--run-dir"):
        RunDirLock(tmp_path)


def test_looking_whether_a_directory_can_be_used_leaves_nothing_behind(tmp_path: Path) -> None:
    check_usable(tmp_path / "not" / "yet", "--run-dir")
    check_usable(tmp_path, "--run-dir")
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_no_run_directory_to_look_into(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file is a file\. Give --run-dir"):
        read_server(tmp_path / "file")
