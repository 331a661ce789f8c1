"""`rollout --env verifiers:NAME`: what the runner says becomes rewards and errors at the server.

The runner here is a double that speaks the runner's protocol. The real one is in `make test-verifiers`.
"""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.cli import main
from openclaw_rl.envs.driver import STOPPED
from openclaw_rl.envs.verifiers.process import RUNNER
from support.episode_server import EpisodeServer, refusal
from support.harness import running, wait_for

#: Ends each attempt as `ENDINGS` says, in turn; writes the settings and its orders to a file.
DOUBLE = """#!{python}
import json, os, sys
settings = json.loads(sys.stdin.readline())
nan = float("nan")
endings = {endings!r}
log = open({log!r}, "a")
print(json.dumps(settings | {{"key": os.environ["OPENCLAW_RL_API_KEY"], "pid": os.getpid()}}), file=log, flush=True)
number = 0
for index, order in enumerate(sys.stdin):
    print(order.strip(), file=log, flush=True)
    if order.strip() == "end":
        # Like the real one, it does not end before its groups have.
        if "hang" in endings:
            continue
        break
    for _ in range(settings["group"]):
        ending = endings[number % len(endings)]
        if ending == "die":
            sys.exit("the tool server did not start")
        if ending == "hang":
            continue
        number += 1
        head = {{"session": f"trace-{{number}}", "index": index, "task": f"t{{index}}", "group": f"g{{index}}"}}
        print(json.dumps(head | ending), flush=True)
    if "hang" not in endings:
        print(json.dumps({{"group_ended": True}}), flush=True)
"""


@pytest.fixture
def server() -> Iterator[EpisodeServer]:
    with running(EpisodeServer(), timeout_graceful_shutdown=0) as server:  # type: ignore[arg-type]
        yield server  # type: ignore[misc]


def flags(server: EpisodeServer, folder: Path, *endings: Any) -> list[str]:
    """The command's flags, with a double whose attempts end like this."""
    python = folder / "python"
    python.write_text(DOUBLE.format(python=sys.executable, endings=endings, log=str(folder / "log")))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return ["--url", server.url, "--env", "verifiers:some-env", "--verifiers-python", str(python)]


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def test_rewards_and_errors_come_back_by_session(
    server: EpisodeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endings = ({"reward": 1.0, "turns": 2}, {"reward": 0.0}, {"error": "the judge is away"})
    given = flags(server, tmp_path, *endings)
    size = ["--tasks", "2", "--group", "3", "--parallel", "3", "--seed", "4", "--max-turns", "5", "--api-key", "secret"]
    assert main(["rollout", *given, *size]) == 0
    first = {"task": "some-env/t0", "group": "g0", "group_size": 3}
    assert server.rewards["trace-1"] == [first | {"reward": 1.0, "solved": True}]
    assert server.rewards["trace-2"] == [first | {"reward": 0.0, "solved": False}]
    assert server.rewards["trace-3"] == [first | {"error": "the judge is away"}]
    assert len(server.rewards) == 6
    settings = json.loads(log(tmp_path)[0])
    assert settings["url"] == f"{server.url}/v1"
    assert (settings["model"], settings["headers"], settings["key"]) == ("the-model", {"X-Episode": "1"}, "secret")
    assert (settings["seed"], settings["max_turns"], settings["parallel"]) == (4, 5, 3)
    assert log(tmp_path)[1:] == ["group", "group", "end"]
    out = capsys.readouterr().out
    assert "4 rewarded, 2 failed, 2 tasks" in out
    assert "2 × the judge is away" in out


def test_a_reward_that_is_no_number_is_an_error(server: EpisodeServer, tmp_path: Path) -> None:
    given = flags(server, tmp_path, {"reward": float("nan")}, {"reward": 0.5})
    assert main(["rollout", *given, "--tasks", "1", "--group", "2", "--eval"]) == 0
    assert server.rewards["trace-1"][0]["error"].startswith("the environment gave the reward nan")
    assert server.rewards["trace-2"][0]["reward"] == 0.5
    assert json.loads(log(tmp_path)[0])["headers"] == {"X-Episode": "eval"}


def test_what_the_server_would_refuse_is_cut_or_an_error(server: EpisodeServer, tmp_path: Path) -> None:
    endings = ({"error": "x" * 5000, "task": "t" * 5000}, {"reward": 1e9}, {"reward": 1.0})
    server.on_reward = lambda session, number: refusal(400, "odd") if (session, number) == ("trace-3", 1) else None
    assert main(["rollout", *flags(server, tmp_path, *endings), "--tasks", "1", "--group", "3"]) == 1
    cut, large, refused = server.reported
    assert (len(cut["error"]), len(cut["task"])) == (1000, 256)
    assert "the reward 1000000000.0, which is not" in large["error"]
    assert refused == {"task": "some-env/t0", "group": "g0", "group_size": 3, "error": "odd"}


def test_agents_that_are_not_trained_are_not_counted(
    server: EpisodeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    untrained = {"error": "the environment does not train this agent", "trained": False, "group": None}
    assert main(["rollout", *flags(server, tmp_path, {"reward": 1.0}, untrained), "--tasks", "1", "--group", "2"]) == 0
    assert "1 rewarded, 0 failed" in capsys.readouterr().out
    assert server.rewards["trace-2"][0]["error"] == untrained["error"]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="this system does not list processes in /proc")
def test_the_runner_kills_agents_in_sessions_of_their_own(tmp_path: Path) -> None:
    program = """
import runpy, subprocess, sys
from unittest.mock import MagicMock
for name in ("clients", "configs.agent", "configs.env", "types", "utils.generic", "utils.loaders"):
    sys.modules[f"verifiers.v1.{name}"] = MagicMock()
runner = runpy.run_path(sys.argv[1])
# An agent in a session of its own, which starts a process in another one.
agent = '''
import subprocess
sleeper = subprocess.Popen(["sleep", "60"], start_new_session=True)
print(sleeper.pid, flush=True)
sleeper.wait()
'''
subprocess.Popen([sys.executable, "-c", agent], start_new_session=True)
runner["listen"](print)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(RUNNER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    sleeper = Path("/proc") / process.stdout.readline().strip() / "stat"
    assert sleeper.exists()
    process.stdin.close()
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.stdout.close()
    wait_for(lambda: not sleeper.exists() or sleeper.read_text().rpartition(")")[2].split()[0] == "Z")


def test_no_group_begins_while_the_server_is_behind(server: EpisodeServer, tmp_path: Path) -> None:
    server.state |= {"queue": {"to_judge": 0, "to_train": 30}, "next_step": {"needed": 10}}
    given = flags(server, tmp_path, {"reward": 1.0})
    assert main(["rollout", *given, "--tasks", "2", "--minutes", "0.01"]) == 1
    assert log(tmp_path)[1:] == ["end"]


@pytest.mark.parametrize(
    ("endings", "message"),
    [(("die",), "verifiers:some-env failed: the tool server did not start"), (({"reward": 1.0}, "die"), "not start")],
    ids=["at once", "later"],
)
def test_a_runner_that_dies_is_an_error(
    server: EpisodeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], endings: tuple[Any, ...], message: str
) -> None:
    assert main(["rollout", *flags(server, tmp_path, *endings), "--tasks", "2", "--group", "2"]) == 2
    assert message in capsys.readouterr().err
    assert {body["error"] for body in server.reported if "error" in body} <= {STOPPED}


def test_ctrl_c_ends_the_runner_and_its_groups(server: EpisodeServer, tmp_path: Path) -> None:
    given = flags(server, tmp_path, {"reward": 1.0}, "hang")
    command = [sys.executable, "-m", "openclaw_rl", "rollout", *given, "--tasks", "1", "--group", "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        wait_for(lambda: len(server.rewards) == 1)
        process.send_signal(signal.SIGINT)
        assert "Stopped." in process.communicate(timeout=60)[0]
    assert sorted("error" in body for body in server.reported) == [False, True]
    assert server.rewards["g0-stopped-1"] == [{"group": "g0", "group_size": 2, "error": STOPPED}]
    with pytest.raises(ProcessLookupError):
        os.kill(json.loads(log(tmp_path)[0])["pid"], 0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--verifiers-python", "/nowhere/python"], "--verifiers-python /nowhere/python is not a program"),
        (["--measure", "4"], "--measure needs held-out tasks"),
        (["--env-arg", "level=2"], "verifiers: takes no settings"),
    ],
    ids=["python", "measure", "settings"],
)
def test_what_cannot_work_is_refused_in_a_sentence(
    server: EpisodeServer, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    assert main(["rollout", "--url", server.url, "--env", "verifiers:some-env", *more]) == 2
    assert message in capsys.readouterr().err
