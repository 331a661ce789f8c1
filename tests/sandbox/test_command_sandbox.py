"""Commands in the sandbox: what they can do, what they cannot, and that nothing of them remains."""

import asyncio
import os
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.sandbox import command
from openclaw_rl.sandbox.command import command_fences, missing_fences, run_command
from openclaw_rl.sandbox.fences.run_command import PATH
from openclaw_rl.sandbox.programs import EndReason, ProgramOutcome

pytestmark = pytest.mark.skipif(bool(missing_fences()), reason=f"commands cannot be confined: {missing_fences()}")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: others may not enter that, and a command of root runs as nobody."""
    made = Path(tempfile.mkdtemp(prefix="openclaw-test-"))
    yield made
    shutil.rmtree(made)


async def shell(folder: Path, script: str, **options: Any) -> ProgramOutcome:
    return await run_command(["sh", "-c", script], folder, **{"seconds": 20.0, **options})


async def test_a_command_reads_its_input_and_writes_in_its_folder(folder: Path) -> None:
    outcome = await shell(folder, "cat > note; cat note; pwd", stdin='{"a": "ü"}'.encode())
    assert (outcome.ended, outcome.exit_code) == (EndReason.EXITED, 0), outcome.stderr
    assert outcome.stdout == f'{{"a": "ü"}}{folder}\n'
    assert (folder / "note").read_text() == '{"a": "ü"}'


async def test_arguments_are_never_read_by_a_shell(folder: Path) -> None:
    hostile = "$(touch broken); `touch broken` && touch broken"
    assert (await run_command(["echo", hostile], folder)).stdout == hostile + "\n"
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "script",
    [
        "cat /etc/passwd",
        "ls /proc/1/",
        "ls {home}",
        "echo a > {outside}/file",
        "rm {outside}/kept",
        "cat {outside}/kept",
        "ln {outside}/kept here && cat here",
        "cp /bin/ls ls && ./ls",
        "kill -9 {pid}",
    ],
)
async def test_what_a_command_must_not_do_fails(folder: Path, tmp_path: Path, script: str) -> None:
    (tmp_path / "kept").write_text("secret")
    outcome = await shell(folder, script.format(home=Path.home(), outside=tmp_path, pid=os.getpid()))
    assert outcome.exit_code != 0
    assert "secret" not in outcome.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


async def test_what_is_given_can_be_read(folder: Path) -> None:
    given = Path(tempfile.mkdtemp(prefix="openclaw-test-"))
    given.chmod(0o755)
    (given / "data").write_text("given")
    try:
        assert (await shell(folder, f"cat {given}/data", readable=[given])).stdout == "given"
        assert (await shell(folder, f"echo more >> {given}/data", readable=[given])).exit_code != 0
    finally:
        shutil.rmtree(given)


async def test_a_command_has_no_network(folder: Path) -> None:
    python = shutil.which("python3", path="/usr/bin:/bin:/usr/local/bin")
    if python is None:
        pytest.skip("the system has no Python to try sockets with")
    for kind in ("AF_INET, socket.SOCK_STREAM", "AF_INET, socket.SOCK_DGRAM", "AF_UNIX, socket.SOCK_STREAM"):
        outcome = await run_command([python, "-c", f"import socket; socket.socket(socket.{kind})"], folder)
        assert "PermissionError" in outcome.stderr


async def test_a_command_that_hangs_or_floods_is_ended(folder: Path) -> None:
    hanging = await shell(folder, "sleep 60", seconds=0.4)
    assert (hanging.ended, hanging.exit_code) == (EndReason.TIMED_OUT, -9)
    flooding = await shell(folder, "yes", max_output=1000)
    assert (flooding.ended, len(flooding.stdout)) == (EndReason.TOO_MUCH_OUTPUT, 1000)


async def test_processes_and_files_are_limited(folder: Path) -> None:
    if "namespaces" not in command_fences() and "user" not in command_fences():
        pytest.skip("the limit on processes needs user namespaces or root")
    # 100 processes that sleep: far more than are allowed, and few enough for any machine.
    outcome = await shell(folder, "for i in $(seq 100); do sleep 5 & done")
    assert "fork" in outcome.stderr
    outcome = await shell(folder, "head -c 100000000 /dev/zero > large")
    assert outcome.exit_code != 0
    assert (folder / "large").stat().st_size <= 64 << 20


async def test_nothing_that_it_started_remains(folder: Path) -> None:
    if "namespaces" not in command_fences():
        pytest.skip("needs user namespaces")
    await shell(
        folder, "(sleep 0.5; echo late > late) & setsid sh -c 'sleep 0.5; echo late > late' & echo early > early"
    )
    await asyncio.sleep(0.8)  # longer than what remained would need
    assert [path.name for path in folder.iterdir()] == ["early"]


async def test_a_command_that_leaves_its_group_ends_with_its_time(folder: Path) -> None:
    python = shutil.which("python3", path=PATH)
    if python is None or "namespaces" not in command_fences():
        pytest.skip("needs user namespaces and a Python of the system")
    os.mkfifo(folder / "alive")
    (folder / "alive").chmod(0o666)
    leave = "import ctypes, os, time; ctypes.CDLL(None).prctl(1, 0); os.setsid()"
    tell = "alive = os.open('alive', os.O_WRONLY); os.write(alive, b'left'); time.sleep(20)"
    alive = os.open(folder / "alive", os.O_RDONLY | os.O_NONBLOCK)
    try:
        outcome = await run_command([python, "-c", f"{leave}; {tell}"], folder, seconds=2)
        assert outcome.ended is EndReason.TIMED_OUT, outcome.stderr
        assert os.read(alive, 10) == b"left"
        # The end of the pipe is readable once the process is gone.
        assert select.select([alive], [], [], 5)[0]
        assert os.read(alive, 10) == b""
    finally:
        os.close(alive)


async def test_the_status_of_a_command_is_kept(folder: Path) -> None:
    assert (await shell(folder, "(exit 4) & sleep 0.01; exit 3")).exit_code == 3
    assert (await shell(folder, "kill -TERM $$")).exit_code in (-15, 128 + 15)


@pytest.mark.parametrize("change", ["os.chmod(f, 0)", "os.chown(f, -1, -1)", "os.setxattr(f, 'user.a', b'')"])
def test_a_command_of_the_same_user_cannot_change_modes(tmp_path: Path, change: str) -> None:
    if "seccomp" not in command_fences():
        pytest.skip("needs seccomp")
    (tmp_path / "f").touch()
    fence = "from openclaw_rl.sandbox.fences.syscalls import apply_command_filter"
    for keep_modes in (False, True):
        program = (
            f"import os; {fence}; f = {str(tmp_path / 'f')!r}; apply_command_filter(keep_modes={keep_modes}); {change}"
        )
        ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert ("PermissionError" in ended.stderr) == keep_modes, ended.stderr


def test_processes_must_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = "user namespaces"
    for more, missing, missing_for_shells in (
        ((), needed, needed),
        (("user",), "", needed),
        (("namespaces",), "", ""),
    ):
        monkeypatch.setattr(command, "command_fences", lambda more=more: ("limits", "landlock", "seccomp", *more))
        assert command.missing_fences()[:15] == missing
        assert command.missing_fences(hold_processes=True)[:15] == missing_for_shells


def test_another_system_than_linux_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(command, "command_fences", lambda: pytest.fail("there was a trial"))
    assert command.missing_fences() == "Linux"


async def test_the_end_is_seen_without_waitid(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "waitid")
    outcome = await shell(folder, "echo said; exit 3")
    assert (outcome.ended, outcome.exit_code, outcome.stdout) == (EndReason.EXITED, 3, "said\n")


async def test_cancelling_ends_the_command(folder: Path) -> None:
    started = asyncio.create_task(shell(folder, "sleep 60", seconds=60))
    await asyncio.sleep(0)
    started.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(started, 10)


async def test_a_program_that_does_not_exist_says_so(folder: Path) -> None:
    outcome = await run_command(["no-such-program"], folder)
    assert (outcome.exit_code, outcome.stderr) == (
        127,
        "no-such-program cannot be started: No such file or directory.\n",
    )
