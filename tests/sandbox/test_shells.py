"""Sandboxes of every kind: programs and shells inside, what they cannot do, and that nothing of them remains."""

import asyncio
import fcntl
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from openclaw_rl.config.options import ConfigError
from openclaw_rl.sandbox import kinds
from openclaw_rl.sandbox.base import Sandbox, give_folder, remove_folder
from openclaw_rl.sandbox.kinds import ContainerSandbox, OpenSandbox, choose_sandbox, problem_with
from openclaw_rl.sandbox.programs import EndReason
from openclaw_rl.sandbox.shell import Shell
from support.process_stats import open_files

CONFINED = ("fences", "bubblewrap")
#: Stands in for docker: logs its arguments, and runs the command of `run` on this machine.
DOCKER = f"""#!{sys.executable}
import os, sys
open(os.path.join(os.path.dirname(__file__), "log"), "a").write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1] == "run":
    at = sys.argv.index("an-image")
    os.execvpe(sys.argv[at + 1], sys.argv[at + 1:], {{"PATH": os.environ["PATH"]}})
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not tmp_path: others may not enter that, and a command of root runs as nobody."""
    made = Path(tempfile.mkdtemp(prefix="openclaw-test-"))
    give_folder(made)
    yield made
    remove_folder(made)
    assert not made.exists()


@pytest.fixture(params=[*CONFINED, "none"])
def any_sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return OpenSandbox() if request.param == "none" else confined(request.param)


@pytest.fixture(params=CONFINED)
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    return confined(request.param)


def confined(name: str) -> Sandbox:
    if problem := problem_with(name):
        pytest.skip(problem)
    return choose_sandbox(name)


@pytest.fixture
async def shell(any_sandbox: Sandbox, folder: Path) -> AsyncIterator[Shell]:
    opened = Shell(any_sandbox, folder)
    yield opened
    await opened.close()


async def test_a_program_reads_its_input_and_writes_in_its_folder(any_sandbox: Sandbox, folder: Path) -> None:
    outcome = await any_sandbox.run(["sh", "-c", "cat > note; pwd; touch $TMPDIR/x"], folder, stdin=b"text")
    assert (outcome.ended, outcome.exit_code, outcome.stdout) == (EndReason.EXITED, 0, f"{folder}\n"), outcome.stderr
    assert [path.name for path in folder.iterdir()] == ["note"]
    assert (folder / "note").read_bytes() == b"text"
    hanging = await any_sandbox.run(["sleep", "60"], folder, seconds=0.3)
    assert hanging.ended is EndReason.TIMED_OUT


async def test_a_shell_keeps_its_state(shell: Shell, folder: Path) -> None:
    assert (await shell.run("mkdir sub; cd sub; x=5; f() { echo f $1; }; declare -A map=([a]=1)")).exit_code == 0
    result = await shell.run("pwd\necho $x; f 2; echo ${map[a]} >&2; false")
    assert (result.output, result.exit_code, result.shell_ended) == (f"{folder}/sub\n5\nf 2\n1\n", 1, False)


@pytest.mark.parametrize(
    ("command", "output", "status"),
    [
        ("cat", "", 0),  # there is no input
        ("if", "syntax error", 2),
        ("break; echo on", "on\n", 0),
        ("cat <<'X'\n$HOME 'quoted' \"too\"\nX", "$HOME 'quoted' \"too\"\n", 0),
        ("echo ü\N{GRINNING FACE}", "ü\N{GRINNING FACE}\n", 0),
        ("printf '\\xff'", "\N{REPLACEMENT CHARACTER}", 0),
        ("echo forged 0 / >&3", "Bad file descriptor", 1),
        ("exec >/dev/null; echo gone", "", 0),
        ("printf '#!/bin/sh\\necho ran' > s; chmod +x s; ./s", "ran\n", 0),
        ("cat <(echo substituted)", "substituted\n", 0),
        ("seq 5000 | tail -n 1", "5000\n", 0),
        ("nonexistent", "command not found", 127),
        ("a\0b() { echo nul; }; ab", "nul\n", 0),
        ("", "", 0),
    ],
)
async def test_what_a_shell_answers(shell: Shell, command: str, output: str, status: int) -> None:
    result = await shell.run(command)
    assert output in result.output
    assert (result.exit_code, result.shell_ended) == (status, False)
    assert (await shell.run("true")).exit_code == 0


@pytest.mark.parametrize(
    ("command", "status"),
    [("exit 3", 3), ("exec true", 0), ("set -e; false", 1), ("kill -9 $$", 137), ("set -u; echo $nothing", 1)],
)
async def test_after_the_end_of_a_shell_the_next_command_has_a_new_one(
    shell: Shell, folder: Path, command: str, status: int
) -> None:
    await shell.run("mkdir sub; cd sub; x=5")
    result = await shell.run(f"echo before; {command}")
    assert (result.output.startswith("before\n"), result.exit_code, result.shell_ended) == (True, status, True)
    assert (await shell.run('pwd; echo "x=$x"')).output == f"{folder}/sub\nx=\n"


async def test_a_command_that_hangs_or_floods_is_ended(shell: Shell) -> None:
    result = await shell.run("echo begun; sleep 60; echo never", seconds=0.5)
    assert (result.output, result.exit_code, result.timed_out) == ("begun\n", None, True)
    result = await shell.run("yes", seconds=20)
    assert (result.exit_code, result.timed_out, result.flooded) == (None, False, True)
    assert len(result.output) < 17_000
    assert "bytes cut" in result.output
    result = await shell.run("seq 100000; echo last", max_output=100)
    assert result.exit_code == 0
    assert result.output.startswith("1\n2\n")
    assert result.output.endswith("last\n")
    assert len(result.output) < 150


async def test_long_commands_and_long_outputs_arrive_whole(shell: Shell) -> None:
    text = "".join(f"line {number}\n" for number in range(15_000))
    result = await shell.run(f"cat <<'END'\n{text}END", max_output=1 << 20)
    assert result.output == text


async def test_background_jobs_live_until_the_shell_is_closed(sandbox: Sandbox, folder: Path) -> None:
    shell = Shell(sandbox, folder)
    (folder / "alive").touch()
    give_folder(folder, whole=True)
    await shell.run(
        "exec 8>alive; flock 8; setsid bash -c 'trap : HUP TERM; sleep 600; :' > /dev/null 2>&1 & exec 8>&-"
    )
    assert is_locked(folder / "alive")
    await shell.run("true")
    assert is_locked(folder / "alive")
    await shell.close()
    assert not is_locked(folder / "alive")


async def test_nothing_of_a_program_remains_after_its_time(sandbox: Sandbox, folder: Path) -> None:
    (folder / "alive").touch()
    give_folder(folder, whole=True)
    start = "exec 8>alive; flock 8; for i in $(seq 50); do setsid sleep 600 > /dev/null 2>&1 & done; wait"
    outcome = await sandbox.run(["bash", "-c", start], folder, seconds=0.5)
    assert not is_locked(folder / "alive")
    assert (outcome.ended, outcome.exit_code) == (EndReason.TIMED_OUT, -9)


async def test_temporary_files_are_deleted_in_a_thread(
    any_sandbox: Sandbox, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deleted = []

    def remove(path: Path) -> None:
        deleted.append(threading.current_thread())
        remove_folder(path)

    monkeypatch.setattr("openclaw_rl.sandbox.base.remove_folder", remove)
    await any_sandbox.run(["true"], folder)
    assert deleted
    assert threading.current_thread() not in deleted


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


@pytest.mark.parametrize(
    "command",
    [
        "cat /etc/passwd /etc/shadow",
        "ls {home}/",
        "echo a > {outside}/file",
        "cat {outside}/kept",
        "rm -f {outside}/kept && ls {outside}/kept",
        "chmod 600 {outside}/kept",
        "ln {outside}/kept here && cat here",
        "ln -s {outside}/kept there; cat there",
        "cat {outside}/../*/kept",
        "kill -9 {pid}",
        "cat /proc/{pid}/environ",
        "echo > /dev/tcp/127.0.0.1/{port}",
    ],
)
async def test_what_a_shell_must_not_do_fails(sandbox: Sandbox, folder: Path, command: str) -> None:
    outside = Path(tempfile.mkdtemp(prefix="openclaw-other-"))
    (outside / "kept").write_text("secret")
    for path in (outside, outside / "kept"):
        path.chmod(0o777)
    # As if it were of another attempt: its owner is the user inside.
    give_folder(outside, whole=True)
    reached = asyncio.Event()
    async with await asyncio.start_server(lambda *_: reached.set(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        shell = Shell(sandbox, folder)
        result = await shell.run(command.format(home=Path.home(), outside=outside, pid=os.getpid(), port=port))
        await shell.close()
        assert result.exit_code != 0
    try:
        assert "secret" not in result.output
        assert [path.name for path in outside.iterdir()] == ["kept"]
        assert (outside / "kept").stat().st_mode & 0o777 == 0o777
        assert not reached.is_set()
    finally:
        shutil.rmtree(outside)


async def test_the_network_is_there_if_it_is_allowed(sandbox: Sandbox, folder: Path) -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"reached\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        connect = f"cat < /dev/tcp/127.0.0.1/{server.sockets[0].getsockname()[1]}"
        shell = Shell(sandbox, folder, network=True)
        assert (await shell.run(connect)).output == "reached\n"
        await shell.close()
        outcome = await sandbox.run(["bash", "-c", connect], folder, network=True)
        assert outcome.stdout == "reached\n", outcome.stderr


async def test_what_is_given_can_be_read_and_run_but_not_changed(sandbox: Sandbox, folder: Path) -> None:
    given = Path(tempfile.mkdtemp(prefix="openclaw-given-"))
    (given / "tool").write_text("#!/bin/sh\necho tool")
    for path in (given, given / "tool"):
        path.chmod(0o755)
    try:
        outcome = await sandbox.run(["sh", "-c", f"{given}/tool; echo >> {given}/tool"], folder, readable=[given])
        assert (outcome.stdout, outcome.exit_code != 0) == ("tool\n", True), outcome.stderr
        assert (await sandbox.run([f"{given}/tool"], folder)).exit_code != 0
    finally:
        shutil.rmtree(given)


async def test_processes_are_limited(sandbox: Sandbox, folder: Path) -> None:
    shell = Shell(sandbox, folder)
    # 100 processes that sleep: more than are allowed, and few enough for any machine.
    result = await shell.run("for i in $(seq 100); do sleep 5 & done; wait", seconds=2)
    assert "fork" in result.output
    await shell.close()


async def test_a_fork_bomb_ends_with_its_time(sandbox: Sandbox, folder: Path) -> None:
    neighbour, shell = Shell(sandbox, folder), Shell(sandbox, folder)
    await neighbour.run("true")
    # The limit is checked first: without it this test would harm the machine.
    assert (await shell.run("ulimit -Hu; id -u")).output.split()[0] == "64"
    assert (await shell.run("id -u")).output.strip() != "0"
    result = await shell.run("bomb() { bomb | bomb & }; bomb; sleep 20", seconds=1.5)
    assert result.shell_ended
    assert (await neighbour.run("for i in 1 2 3; do (echo $i); done")).output == "1\n2\n3\n"
    await asyncio.gather(shell.close(), neighbour.close())


async def test_shells_side_by_side_do_not_see_each_other(sandbox: Sandbox) -> None:
    folders = [Path(tempfile.mkdtemp(prefix="openclaw-test-")) for _ in range(8)]
    shells = [Shell(sandbox, path) for path in folders]
    files_before = open_files(os.getpid())
    await asyncio.gather(*(shell.run(f"echo {number} > mine") for number, shell in enumerate(shells)))
    others = await asyncio.gather(*(shell.run(f"cat {folders[0]}/mine") for shell in shells[1:]))
    assert all(result.exit_code != 0 for result in others)
    assert [(path / "mine").read_text() for path in folders] == [f"{number}\n" for number in range(8)]
    await asyncio.gather(*(shell.close() for shell in shells))
    for path in folders:
        remove_folder(path)
    assert open_files(os.getpid()) <= files_before


async def test_a_cancelled_command_leaves_nothing(sandbox: Sandbox, folder: Path) -> None:
    shell = Shell(sandbox, folder)
    await shell.run("exec 8>alive; flock 8; sleep 600 &")
    running = asyncio.create_task(shell.run("sleep 600", seconds=600))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not is_locked(folder / "alive")


async def test_odd_folders_are_deleted(any_sandbox: Sandbox, folder: Path) -> None:
    inside = folder / "inside"
    inside.mkdir()
    shell = Shell(any_sandbox, inside)
    deep = "d=$(printf 'deep/%.0s' {1..120}); for i in $(seq 9); do mkdir -p $d; cd $d; done; cd ~"
    await shell.run(f"{deep}; touch $'a\\nb' -- -rf; mkdir locked; touch locked/f; chmod 0 locked; ln -s / root")
    await shell.close()
    remove_folder(inside)
    assert not inside.exists()


def test_auto_prefers_bubblewrap_and_refuses_to_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    problems = {"bubblewrap": "", "fences": ""}
    monkeypatch.setattr(kinds, "problem_with", lambda name, image="": problems[name])
    assert choose_sandbox().name == "bubblewrap"
    problems["bubblewrap"] = "bwrap is not installed"
    assert choose_sandbox().name == "fences"
    problems["fences"] = "the project's own fences need Landlock"
    with pytest.raises(
        ConfigError, match=r"bwrap is not installed; the project's .* need Landlock.*Install bubblewrap"
    ):
        choose_sandbox()
    assert choose_sandbox(allow_none=True).name == "none"
    with pytest.raises(ConfigError, match="--sandbox bubblewrap does not work on this machine: bwrap is not installed"):
        choose_sandbox("bubblewrap", allow_none=True)
    with pytest.raises(ConfigError, match="There is no sandbox 'none'"):
        choose_sandbox("none")


def test_a_missing_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name, program in (("bubblewrap", "bwrap"), ("docker", "docker"), ("podman", "podman")):
        with pytest.raises(ConfigError, match=f"{program} is not installed"):
            choose_sandbox(name, image="not cached")


async def test_a_container_runtime_gets_the_whole_order(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "docker").write_text(DOCKER)
    (tmp_path / "docker").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    sandbox = choose_sandbox("docker", image="an-image")
    assert isinstance(sandbox, ContainerSandbox)
    assert sandbox.about == "docker, image an-image"
    shell = Shell(sandbox, folder, network=True)
    assert (await shell.run("x=1; pwd; y=$x")).output == f"{folder}\n"
    assert (await shell.run("echo $y")).output == "1\n"
    await shell.close()
    trial, removed_trial, started, removed = (tmp_path / "log").read_text().splitlines()
    assert removed_trial.split()[:2] == removed.split()[:2] == ["rm", "--force"]
    assert removed.split()[2] in started
    for flag in ("--rm", "--read-only", "--cap-drop ALL", "no-new-privileges", "--pids-limit 64", "--memory 512m"):
        assert flag in started
    assert f"--volume {folder}:{folder} --workdir {folder}" in started
    assert "--user 0:" not in started
    assert "--network none" in trial
    assert "--network" not in started


async def test_a_shell_that_cannot_start_says_so(folder: Path) -> None:
    class Broken(OpenSandbox):
        def command_line(self, argv: object, allowance: object) -> list[str]:
            return ["sh", "-c", "echo no luck; exit 1"]

    shell = Shell(Broken(), folder)
    with pytest.raises(OSError, match="the sandbox none cannot start a shell: no luck"):
        await shell.run("true")
    await shell.close()
