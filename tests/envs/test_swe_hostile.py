"""Attempts to be rewarded without mending the bug, and to harm others while the tests run."""

import asyncio
import os
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from openclaw_rl.envs.base import EnvFailed
from openclaw_rl.envs.swe import assert_tests, suites
from openclaw_rl.envs.swe.assert_tests import AssertSuite
from openclaw_rl.envs.swe.suites import Interpreter, PytestSuite
from openclaw_rl.sandbox.base import Allowance
from openclaw_rl.sandbox.kinds import FencedSandbox, problem_with
from support.swe_policies import call, needs_sandbox, said, small_episode

pytestmark = needs_sandbox

CALC = "def add(a, b):\n    return a - b\n"
TESTS = "from calc import add\n\n\ndef test_add():\n    assert add(2, 3) == 5\n    assert add(4, 4) == 8\n"
TEST_OF_AN_EXCEPTION = """
from calc import add

def raises(kind, function, *arguments):
    try:
        function(*arguments)
    except kind:
        return True
    return False

def test_add():
    assert raises(ValueError, add, 2, 3)
"""
ADD = "tests/test_calc.py::test_add"
REPORT = '["tests/test_calc.py", "test_add", [[0, "True"], [1, "True"]], ""]'

#: Code that tries to pass the test without adding.
CHEATS = {
    "an object that equals everything": """
class Same:
    def __eq__(self, other):
        return True

def add(a, b):
    return Same()
""",
    "a report of its own": f"""
import os
for number in range(1, 20):
    try:
        os.write(number, b'''{REPORT}\\n''')
    except OSError:
        pass
os._exit(0)
""",
    "reports that cannot be read": """
import os
for report in ('["a", "b", [[1e999, "x"]], ""]', '["a", "b", [[0, %s]], ""]' % ("[" * 900 + "]" * 900), "[" * 9000):
    for number in range(1, 20):
        try:
            os.write(number, report.encode() + b"\\n")
        except OSError:
            pass
""",
    "an early exit": "import os; os._exit(0)",
    "SystemExit": "raise SystemExit(0)",
    "another __see__": """
import sys

def add(a, b):
    sys._getframe(1).f_globals["__see__"] = lambda *_: None
    return a - b
""",
    "a test that is left out": """
import sys
frame = sys._getframe(0)
while frame:
    if "names" in frame.f_locals:
        frame.f_locals["names"].clear()
    frame = frame.f_back

def add(a, b):
    return a - b
""",
}
CONNECTS = """
import socket

def add(a, b):
    try:
        socket.create_connection(("127.0.0.1", PORT), 2).close()
    except OSError:
        return a + b
    return "connected"
"""
READS = """
def add(a, b):
    try:
        return open(PATH).read()
    except OSError:
        return a + b
"""
LEAVES_A_DAEMON = """
import os

def add(a, b):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.execvp("python3", ["python3", "-c", "import time; time.sleep(60)", MARK])
    return a + b
"""
WRITES = """
import os
left = os.path.exists("left")
open("left", "w").close()

def add(a, b):
    return left
"""
#: Bounded: it tries a hundred processes, and the limit is 64.
FORKS = """
import os, time

def add(a, b):
    for number in range(100):
        try:
            if os.fork() == 0:
                time.sleep(5)
                os._exit(0)
        except OSError:
            return a + b
    return "no limit"
"""
IGNORES_SIGNALS = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32))
while True:
    pass
"""


@pytest.fixture(params=["bubblewrap", "fences"])
def sandbox(request: pytest.FixtureRequest) -> str:
    if problem := problem_with(request.param):
        pytest.skip(problem)
    return str(request.param)


async def judged(code: str, *more: tuple[str, str], sandbox: str = "auto") -> tuple[float, bool, float]:
    """Reward, solved and seconds of an attempt that puts code into the module, and makes further files."""
    attempt = small_episode({"calc.py": CALC}, {"tests/test_calc.py": TESTS}, ADD, sandbox=sandbox)
    await attempt.step(call("edit", path="calc.py", old=CALC, new=code))
    for path, content in more:
        await attempt.step(call("edit", path=path, old="", new=content))
    started = time.monotonic()
    outcome = await attempt.outcome()
    await attempt.close()
    return outcome.reward, outcome.solved, time.monotonic() - started


class TestTheChecker:
    @pytest.mark.parametrize("cheat", CHEATS)
    async def test_a_cheat_is_not_rewarded_as_solved(self, cheat: str) -> None:
        reward, solved, _ = await judged(CHEATS[cheat])
        assert not solved
        assert reward <= 0.1

    async def test_an_exception_that_is_not_raised_cannot_be_feigned_by_other_builtins(self) -> None:
        attempt = small_episode({"calc.py": CALC}, {"tests/test_calc.py": TEST_OF_AN_EXCEPTION}, ADD)
        code = "import builtins\nbuiltins.bool = lambda _: True\n"
        await attempt.step(call("edit", path="calc.py", old=CALC, new=code + CALC))
        assert not (await attempt.outcome()).solved
        raising = "class Wrong(ValueError):\n    pass\n\n\ndef add(a, b):\n    raise Wrong\n"
        await attempt.step(call("edit", path="calc.py", old=code + CALC, new=raising))
        assert (await attempt.outcome()).solved

    async def test_edits_of_tests_change_nothing(self) -> None:
        attempt = small_episode({"calc.py": CALC}, {"tests/test_calc.py": TESTS}, ADD)
        await attempt.step(call("edit", path="tests/test_calc.py", old="== 5\n    assert add(4, 4) == 8", new="== -1"))
        # The policy sees its own test pass, but is not judged by it.
        assert said(await attempt.step(call("run_tests"))) == "All 1 tests pass."
        outcome = await attempt.outcome()
        assert (outcome.reward, outcome.solved) == (0.0, False)

    async def test_files_that_python_or_a_runner_loads_by_itself_change_nothing(self) -> None:
        fake = "import os\nos._exit(0)\n"
        names = ("conftest.py", "sitecustomize.py", "usercustomize.py", "json.py", "signal.py", "tests/__init__.py")
        fixed = CALC.replace("a - b", "a + b")
        _, solved, _ = await judged(fixed, *((name, fake) for name in names))
        assert solved
        _, solved, _ = await judged(CALC + "\n", *((name, fake) for name in names))
        assert not solved

    async def test_what_code_writes_while_tests_run_is_gone_in_the_next_run(self) -> None:
        attempt = small_episode({"calc.py": CALC}, {"tests/test_calc.py": TESTS}, ADD)
        await attempt.step(call("edit", path="calc.py", old=CALC, new=WRITES))
        for _ in range(2):
            assert "gives False" in said(await attempt.step(call("run_tests")))


class BrokenSandbox(FencedSandbox):
    """Starts nothing."""

    def command_line(self, argv: Sequence[str], allowance: Allowance) -> list[str]:
        return ["sh", "-c", "echo 'no namespaces here' >&2; exit 1"]


class TestABrokenSandbox:
    """The policy is not to blame, so its attempt does not count."""

    @pytest.mark.parametrize("runner", ["asserts", "pytest"])
    async def test_no_test_was_started(self, runner: str) -> None:
        tests = {"tests/test_calc.py": TESTS}
        suite: suites.TestSuite = AssertSuite(BrokenSandbox(), tests)
        if runner == "pytest":
            suite = PytestSuite(BrokenSandbox(), Interpreter(), tests, [ADD], 5.0)
        attempt = small_episode({"calc.py": CALC}, tests, ADD, suite=suite)
        await attempt.step(call("edit", path="calc.py", old="a - b", new="a + b"))
        for run in (attempt.step(call("run_tests")), attempt.outcome()):
            with pytest.raises(EnvFailed, match="no namespaces here"):
                await run


class TestHarm:
    async def test_an_endless_loop_ends(self, sandbox: str) -> None:
        _, solved, seconds = await judged("def add(a, b):\n    while True:\n        pass\n", sandbox=sandbox)
        assert not solved
        assert seconds < 15

    async def test_an_endless_loop_that_ignores_signals_ends(
        self, sandbox: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(assert_tests, "RUN_SECONDS", 3.0)
        _, solved, seconds = await judged(IGNORES_SIGNALS, sandbox=sandbox)
        assert not solved
        assert seconds < 25

    async def test_a_flood_of_output_ends(self, sandbox: str) -> None:
        code = "import sys\nwhile True:\n    sys.stderr.write('x' * 65536)\n"
        _, solved, seconds = await judged(code, sandbox=sandbox)
        assert not solved
        assert seconds < 15

    async def test_much_memory_is_refused(self, sandbox: str) -> None:
        _, solved, _ = await judged("data = bytearray(2 << 30)\ndef add(a, b):\n    return a + b\n", sandbox=sandbox)
        assert not solved

    async def test_no_network(self, sandbox: str) -> None:
        listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        _, solved, _ = await judged(CONNECTS.replace("PORT", str(port)), sandbox=sandbox)
        listener.close()
        assert solved  # the connection was refused, so it added

    async def test_files_of_other_episodes_and_of_the_user_are_not_read(self, sandbox: str, tmp_path: Path) -> None:
        secret = tmp_path / "secret"
        secret.write_text("secret")
        for folder in (tmp_path, *tmp_path.parents[:-2]):
            folder.chmod(folder.stat().st_mode | 0o055)
        _, solved, _ = await judged(READS.replace("PATH", repr(str(secret))), sandbox=sandbox)
        assert solved

    async def test_the_number_of_processes_is_limited(self, sandbox: str) -> None:
        _, solved, seconds = await judged(FORKS, sandbox=sandbox)
        assert solved  # a process was refused, so it added
        assert seconds < 10

    async def test_a_daemon_ends_with_the_run(self, sandbox: str) -> None:
        mark = f"openclaw-daemon-{os.getpid()}-{time.monotonic_ns()}"
        await judged(LEAVES_A_DAEMON.replace("MARK", repr(mark)), sandbox=sandbox)
        assert not [pid for pid in os.listdir("/proc") if pid.isdecimal() and mark in command_line(pid)]


def command_line(pid: str) -> str:
    try:
        return Path("/proc", pid, "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
