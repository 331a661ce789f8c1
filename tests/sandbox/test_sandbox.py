"""Programs that mean harm, run for real: each must fail, and leave nothing behind."""

import asyncio
import contextlib
import os
import socket
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from openclaw_rl.sandbox import programs as sandbox
from openclaw_rl.sandbox.programs import EndReason, ProgramOutcome, run_python
from support.properties import examples

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's fences are Linux'")

#: Turns Python's own fence off from inside, as a clever program would: its hook is an object like any other.
UNDO_HOOK = """
import gc, types, sys
ctypes = sys.modules["ctypes"]
for thing in gc.get_objects():
    if isinstance(thing, types.FunctionType) and thing.__name__ == "hook" and thing.__closure__:
        cells = dict(zip(thing.__code__.co_freevars, thing.__closure__))
        cells["refused"].cell_contents = ("nothing at all",)
        cells["writing"].cell_contents = 0
        cells["readable_file"].cell_contents = lambda path: True
libc = ctypes.CDLL(None, use_errno=True)
"""


async def outcome(program: str, **limits: float) -> ProgramOutcome:
    return await run_python(textwrap.dedent(program), **{"seconds": 5, "memory_mib": 256, **limits})  # type: ignore[arg-type]


async def refused(program: str) -> None:
    """The program reaches its last line and is refused there."""
    seen = await outcome("print('begun', flush=True)\n" + textwrap.dedent(program) + "\nprint('done')")
    assert seen.stdout == "begun\n", seen
    assert seen.ended is EndReason.EXITED
    assert seen.exit_code == 1
    assert "PermissionError" in seen.stderr, seen.stderr
    # It is the kernel that refuses where Python's own fence has been undone.
    assert ("The sandbox" in seen.stderr) == (UNDO_HOOK not in program), seen.stderr


async def test_a_program_computes_and_prints():
    seen = await outcome(
        "import sys, math, re\nprint(math.comb(10, 3), '✓')\nprint('oh', file=sys.stderr)\nsys.exit(3)"
    )
    assert (seen.ended, seen.exit_code, seen.stdout, seen.stderr) == (EndReason.EXITED, 3, "120 ✓\n", "oh\n")


async def test_the_standard_library_is_there_and_other_packages_are_not():
    library = "random, hashlib, decimal, datetime, zoneinfo, dataclasses, unittest, bz2, sqlite3, asyncio, subprocess"
    seen = await outcome(f"import {library}\nprint(zoneinfo.ZoneInfo('UTC'), hashlib.sha256(b'').hexdigest()[:4])")
    assert seen.stdout == "UTC e3b0\n", seen.stderr
    for package in ("numpy", "openclaw_rl", "fences.child"):
        assert (
            "ModuleNotFoundError"
            in (await outcome(f"import sys\nsys.modules.pop('fences', 0)\nimport {package}")).stderr
        )


async def test_an_error_of_the_program_is_told():
    seen = await outcome("def f():\n    return 1 / 0\nf()")
    assert seen.exit_code == 1
    assert "ZeroDivisionError" in seen.stderr
    assert "line 2" in seen.stderr


async def test_it_starts_with_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENCLAW_SECRET", "sesame")
    seen = await outcome(
        "import os, sys\nprint(dict(os.environ), sys.argv[1:], sys.orig_argv, os.listdir('.'), repr(sys.stdin.read()))"
    )
    assert seen.stdout == "{} [] [] [] ''\n"


async def test_secrets_of_the_parent_stay_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENCLAW_SECRET", "sesame")
    if sys.platform == "linux":
        await refused(f"print(open('/proc/{os.getpid()}/environ').read())")
        await refused(UNDO_HOOK + f"print(open('/proc/{os.getpid()}/environ').read())")
        await refused(UNDO_HOOK + "import os\nprint(open(f'/proc/{os.getppid()}/cmdline').read())")
    await refused("import os\nprint(open(os.path.expanduser('~/.bashrc')).read())")


@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(3600)"], ids=["busy", "asleep"])
async def test_an_endless_program_is_ended(program: str):
    seen = await outcome(program, seconds=0.5)
    assert seen.ended is EndReason.TIMED_OUT
    assert 0.5 <= seen.seconds < 3


async def outcome_of_endless(program: str) -> ProgramOutcome:
    """Of a program that says something and then goes on for ever; a slow machine may need longer until it has."""
    for seconds in (0.7, 5.0, 30.0):
        seen = await outcome(program, seconds=seconds)
        if seen.stdout:
            break
    return seen


async def test_signals_cannot_be_ignored_for_ever():
    deaf = """
        import signal, time
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        print("deaf", flush=True)
        while True:
            time.sleep(1)
    """
    seen = await outcome_of_endless(deaf)
    assert (seen.ended, seen.stdout) == (EndReason.TIMED_OUT, "deaf\n")


async def test_what_was_said_before_the_end_is_kept():
    seen = await outcome_of_endless("import time\nprint('so far', flush=True)\ntime.sleep(3600)")
    assert seen.stdout == "so far\n"


@linux_only
@pytest.mark.parametrize("hog", ["x = bytearray(10**9)", "x = []\nwhile True: x.append(' ' * 10**6 + str(len(x)))"])
async def test_memory_is_limited(hog: str):
    seen = await outcome(hog)
    assert seen.ended is EndReason.EXITED
    assert "MemoryError" in seen.stderr


@pytest.mark.parametrize("stream", [1, 2])
async def test_output_is_capped(stream: int):
    seen = await run_python(f"import os\nwhile True: os.write({stream}, b'x' * 65536)", seconds=5, max_output=100_000)
    assert seen.ended is EndReason.TOO_MUCH_OUTPUT
    assert len(seen.stdout + seen.stderr) == 100_000
    assert seen.seconds < 4


async def test_much_output_within_the_cap_arrives_whole():
    seen = await outcome("print('é' * 100_000)")
    assert seen.stdout == "é" * 100_000 + "\n"


@pytest.mark.parametrize(
    "start",
    [
        "import os\nos.fork()",
        "import os\nos.system('true')",
        "import os\nos.execv('/bin/true', ['true'])",
        "import subprocess\nsubprocess.run(['true'])",
        "import os\nos.posix_spawn('/bin/true', ['true'], {})",
    ],
)
async def test_no_other_process_is_started(start: str):
    await refused(start)


@linux_only
async def test_a_fork_bomb_fizzles():
    before = len(psutil.pids())
    seen = await outcome(
        UNDO_HOOK + "import os\nwhile True:\n    try: os.fork()\n    except OSError as e: print(e); break"
    )
    assert "Permission denied" in seen.stdout, seen
    assert len(psutil.pids()) < before + 20


@linux_only
async def test_threads_are_refused():
    assert (
        "can't start new thread" in (await outcome("import threading\nthreading.Thread(target=print).start()")).stderr
    )


@linux_only
async def test_a_daemon_is_not_left_behind():
    """Also where every way to fork is tried, with the audit hook undone, no process of the program outlives it."""
    marker = f"daemon-of-{os.getpid()}"
    seen = await outcome(
        UNDO_HOOK
        + f"""
import os, time
for fork in (os.fork, libc.fork, libc.vfork, lambda: libc.syscall(57), lambda: libc.syscall(56, 17)):
    try:
        child = fork()
    except OSError:
        child = -1
    if child == 0:
        os.setsid()
        if libc.fork() == 0:
            libc.prctl(15, b"{marker[:15]}")
            time.sleep(3600)
        os._exit(0)
    print(child)
"""
    )
    assert seen.stdout == "-1\n" * 5, seen
    assert marker[:15] not in {process.name() for process in psutil.process_iter()}


@pytest.fixture
def listener():
    """A loopback socket that a program inside must not reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0)
        yield server


@pytest.fixture
def datagrams():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.1", 0))
        server.settimeout(0)
        yield server


async def test_tcp_is_out_of_reach(listener: socket.socket):
    await refused(f"import socket\nsocket.create_connection({listener.getsockname()}, timeout=1)")
    with pytest.raises(BlockingIOError):
        listener.accept()


async def test_udp_is_out_of_reach(datagrams: socket.socket):
    send = "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    await refused(send + f"s.sendto(b'hello', {datagrams.getsockname()})")
    with pytest.raises(BlockingIOError):
        datagrams.recv(100)


@linux_only
async def test_the_kernel_refuses_sockets_without_the_audit_hook(listener: socket.socket, datagrams: socket.socket):
    tcp, udp = listener.getsockname(), datagrams.getsockname()
    await refused(UNDO_HOOK + f"import socket\nsocket.create_connection({tcp}, timeout=1)")
    kind = "socket.AF_INET, socket.SOCK_DGRAM"
    await refused(UNDO_HOOK + f"import socket\nsocket.socket({kind}).sendto(b'hello', {udp})")
    seen = await outcome(
        UNDO_HOOK + "print([libc.socket(family, 1, 0) for family in (1, 2, 10, 16, 17)], libc.syscall(425, 8, 0))"
    )
    assert seen.stdout == "[-1, -1, -1, -1, -1] -1\n", seen.stderr
    with pytest.raises(BlockingIOError):
        listener.accept()
    with pytest.raises(BlockingIOError):
        datagrams.recv(100)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    path = tmp_path / "precious.txt"
    path.write_text("keep me")
    return path


HARM = [
    "open({path!r}, 'w').write('gone')",
    "open({path!r}, 'a').write('more')",
    "open({path!r}, 'r+').write('more')",
    "os.open({path!r}, os.O_RDONLY | os.O_TRUNC)",
    "os.remove({path!r})",
    "os.rename({path!r}, {path!r} + '.old')",
    "os.truncate({path!r}, 0)",
    "os.chmod({path!r}, 0o777)",
    "os.symlink({path!r}, {path!r} + '.link')",
    "os.mkdir({path!r} + '.folder')",
    "shutil.rmtree({folder!r})",
    "open({path!r})",
    "open({path!r} + '.new', 'x')",
    "open(os.path.join(os.getcwd(), os.pardir, 'openclaw-harm.txt'), 'w')",
    "open(os.path.expanduser('~/openclaw-harm.txt'), 'w')",
    "open('here.txt', 'w')",
    "os.open('.', getattr(os, 'O_TMPFILE', 0) | os.O_RDWR)",
]


def unharmed(precious: Path) -> bool:
    alone = [path.name for path in precious.parent.iterdir()] == ["precious.txt"]
    return alone and precious.read_text() == "keep me" and precious.stat().st_mode & 0o777 != 0o777


@pytest.mark.parametrize("harm", HARM)
async def test_files_outside_are_safe(harm: str, precious: Path):
    await refused(f"import os, shutil\n{harm.format(path=str(precious), folder=str(precious.parent))}")
    assert unharmed(precious)


@linux_only
async def test_files_outside_are_safe_without_the_audit_hook(precious: Path):
    acts = [harm.format(path=str(precious), folder=str(precious.parent)) for harm in HARM]
    tries = f"""
import os, shutil
for act in {acts!r}:
    try:
        exec(act)
    except PermissionError as error:
        assert error.errno == 13, error
    else:
        print(act)
"""
    seen = await outcome(UNDO_HOOK + tries)
    assert (seen.stdout, seen.stderr) == ("", "")
    assert unharmed(precious)
    assert not (Path(os.path.expanduser("~")) / "openclaw-harm.txt").exists()


@linux_only
@pytest.mark.parametrize(
    "attempt",
    [
        "os.kill(os.getppid(), 0)",
        "os.kill(-1, 0)",
        "os.killpg(os.getpgid(os.getppid()), 0)",
        "resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (1, 1))",
        "resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))",
        "os.setpriority(os.PRIO_PROCESS, os.getppid(), 19)",
        "fcntl.fcntl(1, fcntl.F_SETOWN, os.getppid())",
        "os.setsid()",
        "os.setuid(0)",
        "os.chroot('.')",
        "os.memfd_create('memory')",
    ],
)
async def test_neither_the_parent_nor_the_limits_can_be_touched(attempt: str):
    await refused(UNDO_HOOK + f"import os, resource, fcntl\n{attempt}")


async def test_another_session_of_its_own_does_not_save_it():
    """A program may not be where it was when it is ended."""
    escape = (
        "import os, time\ntry: os.setpgid(0, 0)\nexcept OSError: pass\nprint(os.getpid(), flush=True)\ntime.sleep(3600)"
    )
    seen = await outcome_of_endless(escape)
    assert not psutil.pid_exists(int(seen.stdout))


async def test_a_cancelled_run_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    # Other tests may have left helpers of their own.
    others = set(psutil.Process().children())
    task = asyncio.create_task(outcome("import time\ntime.sleep(3600)", seconds=60))
    while not (children := set(psutil.Process().children()) - others):
        await asyncio.sleep(0.01)
    started = time.monotonic()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert task.cancelled()
    assert time.monotonic() - started < 5
    assert not any(child.is_running() for child in children)
    assert list(tmp_path.iterdir()) == []


async def test_several_run_beside_each_other():
    seen = await asyncio.gather(*(outcome(f"print({n} ** 2)") for n in range(6)))
    assert [one.stdout for one in seen] == [f"{n * n}\n" for n in range(6)]


def test_the_fences_of_this_machine_are_named():
    held = sandbox.fences()
    assert {"limits", "audit hook"} <= set(held) <= {"limits", "namespaces", "landlock", "seccomp", "audit hook"}
    if sys.platform == "linux" and os.uname().machine in ("x86_64", "aarch64"):
        assert "seccomp" in held


@examples(12)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_program_with_an_outcome(source: bytes):
    seen = asyncio.run(run_python(source.decode("utf-8", "surrogateescape"), seconds=5))
    assert seen.ended is EndReason.EXITED
