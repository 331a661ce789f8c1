"""`openclaw-rl rollout`: which server it uses, what it prints, and how it ends."""

import contextlib
import json
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.cli import main
from openclaw_rl.envs import rollout
from openclaw_rl.envs.driver import STOPPED
from openclaw_rl.lab.server import RunningServer
from openclaw_rl.ledger.run_dir import read_server
from support.episode_server import EpisodeServer, completion
from support.harness import running, wait_for
from support.server_program import ROOT

SUMS = f"{ROOT / 'examples' / 'custom_environment.py'}:Sums"


@pytest.fixture
def server() -> Iterator[EpisodeServer]:
    with running(EpisodeServer(), timeout_graceful_shutdown=0) as server:  # type: ignore[arg-type]
        yield server  # type: ignore[misc]


def solves(session: str, bodies: list[dict[str, Any]]) -> str:
    """A policy that can add, but only every second time."""
    a, b = (int(word.strip("?")) for word in bodies[-1]["messages"][0]["content"].split() if word.strip("?").isdigit())
    return str(a + b) if len(bodies) == 2 or session.endswith("0") else "seven"


def test_the_example_environment_rewards_sums(server: EpisodeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = lambda session, number: completion(number, content=solves(session, server.requests[session]))
    flags = ["--url", server.url, "--env", SUMS, "--tasks", "3", "--group", "2", "--parallel", "2"]
    assert main(["rollout", *flags]) == 0
    assert sorted(body["reward"] for body in server.reported) == [0.5, 0.5, 0.5, 1.0, 1.0, 1.0]
    (hint,) = {step["text"][:13] for body in server.reported for step in body.get("steps", [])}
    assert hint == "The answer is"
    assert {body["task"].partition("/")[0] for body in server.reported} == {"Sums"}
    out = capsys.readouterr().out
    assert "6 rewarded, 0 failed, 3 tasks" in out
    assert "0.750" in out
    assert "100.0 %" in out


def test_a_study_measures_the_same_held_out_tasks_before_and_after(
    server: EpisodeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(session: str, number: int) -> Any:
        trained = sum("group" in body for body in server.reported)
        return completion(number, min(trained, 1), content=solves(session, server.requests[session]) if trained else "")

    server.script = answer
    flags = ["--env", SUMS, "--tasks", "2", "--group", "2", "--measure", "12", "--json", str(tmp_path / "out.jsonl")]
    assert main(["rollout", "--url", server.url, "--seed", "5", *flags]) == 0
    asked = [bodies[0] for bodies in server.requests.values()]
    before, after = asked[:12], asked[-12:]
    assert sorted(map(json.dumps, before)) == sorted(map(json.dumps, after))
    modes = [headers["x-episode"] for headers in server.headers]
    assert (modes[0], modes[-1], modes.count("1") > 0) == ("eval", "eval", True)
    (line,) = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert (line["env"], line["seed"], line["before"]["solved"]["mean"], line["after"]["solved"]["mean"]) == (
        "Sums",
        5,
        0.0,
        1.0,
    )
    assert line["change"]["p"] < 0.001
    assert [point["episodes"] for point in line["curve"]] == [4]
    assert "Held-out tasks solved" in capsys.readouterr().out


def test_a_server_of_its_own_trains_on_what_was_collected_before_it_stops(
    server: EpisodeServer,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @contextlib.asynccontextmanager
    async def run_server(run_dir: Path, *_flags: str) -> AsyncIterator[RunningServer]:
        yield RunningServer(server.url, run_dir)
        stopped.append(server.state)

    def state(version: int, waiting: int) -> dict[str, Any]:
        step = {"step": version + 1, "samples": waiting, "needed": 8, "training": version == 0}
        return {"policy_version": version, "next_step": step, "queue": {"to_judge": 0, "to_train": waiting}}

    def train(*_: Any) -> None:
        """The step ends a while after the last reward."""
        server.state = state(0, 11)
        threading.Timer(0.5, lambda: setattr(server, "state", state(1, 3))).start()

    stopped: list[dict[str, Any]] = []
    server.on_reward = train
    monkeypatch.setattr(rollout, "run_server", run_server)
    flags = ["--env", SUMS, "--tasks", "1", "--group", "1", "--run-dir", str(tmp_path), "--own-server"]
    assert main(["rollout", *flags, "--model-name", str(tiny_model)]) == 0
    assert stopped == [state(1, 3)]
    out = capsys.readouterr().out
    assert "3 judged turns wait for the next training step, which needs 8. " in out
    assert f"with --run-dir {tmp_path} goes on with them; -- --batch-size 3 makes" in out


def test_a_study_measures_each_task_once(
    server: EpisodeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--env", "support.environments:Repeats", "--tasks", "3", "--group", "1", "--measure", "5"]
    assert main(["rollout", "--url", server.url, *flags, "--json", str(tmp_path / "out.jsonl")]) == 0
    assert "before: tasks only 2 different ones" in capsys.readouterr().out
    line = json.loads((tmp_path / "out.jsonl").read_text())
    assert [line[part]["tasks"] for part in ("before", "training", "after")] == [2, 3, 2]


@pytest.mark.more
def test_the_command_starts_a_server_which_learns_from_the_rewards(tiny_model: Path, tmp_path: Path) -> None:
    out, run_dir = tmp_path / "out.jsonl", tmp_path / "run"
    flags = ["--env", "support.environments:Lengths", "--tasks", "2", "--group", "4", "--max-tokens", "8"]
    server = ["--own-server", "--model-name", str(tiny_model), "--run-dir", str(run_dir), "--", "--batch-size", "8"]
    assert main(["rollout", *flags, "--measure", "2", "--json", str(out), *server]) == 0
    (line,) = map(json.loads, out.read_text().splitlines())
    assert (line["method"], line["before"]["policy_version"], line["after"]["policy_version"]) == ("rl", 0, 2)
    assert line["training"]["failures"] == line["training"]["unrecorded"] == {}
    assert (run_dir / "curve.svg").read_text().startswith("<svg")


def test_variables_of_the_environment_are_options(
    server: EpisodeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ENV_TYPE", SUMS)
    monkeypatch.setenv("PARALLEL_ENVS", "many")
    assert main(["rollout", "--url", server.url]) == 2
    assert "--parallel 'many' (from environment PARALLEL_ENVS) is not valid" in capsys.readouterr().err
    monkeypatch.setenv("PARALLEL_ENVS", "3")
    server.seconds = 0.3
    assert main(["rollout", "--url", server.url, "--tasks", "6", "--group", "1", "--max-turns", "1"]) == 0
    assert server.most_running == 3
    monkeypatch.setenv("TOOLS_CONFIG", "tools.yaml")
    assert main(["rollout", "--url", server.url]) == 2
    assert "does not take tools_config" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--env", "nothing"], "There is no environment 'nothing': use one of toolcall"),
        (["--env", "nowhere.py:Name"], "--env: there is no file nowhere.py."),
        (["--env", SUMS.replace("Sums", "Sum")], "cannot be made: .*TypeError"),
        (["--env", "json:dumps"], "cannot be made"),
        (["--env", "json:decoder"], "is not an environment: it has no tasks and no open."),
        (["--env", SUMS, "--env-arg", "levels=[1]"], "does not take levels; it takes no settings."),
        (["--sandbox", "fences"], "--env toolcall does not take sandbox"),
        (["--unsafe-no-sandbox"], "--env toolcall does not take unsafe_no_sandbox"),
        (["--sandbox", "tent"], "--sandbox 'tent' (from flag) is not valid"),
        (["--env-arg", "levels"], "--env-arg levels is not NAME=VALUE."),
        (["--tasks", "0"], "--tasks '0' (from flag) is not valid"),
        (["--group", "1025"], "--group '1025' (from flag) is not valid"),
        (["--", "--judge-api-key=s3"], "--judge-api-key cannot be given after --"),
        (["--", "--judge-api", "s3"], "--judge-api-key cannot be given after --"),
        (["--own-server"], "--url and --own-server exclude each other."),
        (["--method", "rl"], "--method is for a server that this command starts"),
        (["--measure", "9", "--eval"], "--measure and --eval exclude each other"),
        (["--split", "nowhere"], "toolcall has no split nowhere; the splits are train and held-out."),
        (["--json", "/nowhere/out.jsonl"], "/nowhere/out.jsonl cannot be written: No such file or directory."),
    ],
)
def test_a_mistake_is_one_sentence(
    server: EpisodeServer, capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str
) -> None:
    assert main(["rollout", "--url", server.url, "--tasks", "1", "--group", "1", *flags]) == 2
    errors = capsys.readouterr().err
    if ".*" in sentence:
        assert all(part in errors for part in sentence.split(".*"))
    else:
        assert sentence in errors
    assert errors.count("\n") == 1
    assert not server.requests


def test_nothing_recorded_is_a_failure(server: EpisodeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = lambda session, number: completion(number, content=7)
    flags = ["--env", SUMS, "--tasks", "2", "--group", "1", "--parallel", "1"]
    assert main(["rollout", "--url", server.url, *flags]) == 1
    assert "2 × step failed: custom_environment.py" in capsys.readouterr().out


def test_control_c_ends_the_command_in_order(server: EpisodeServer) -> None:
    flags = ["--url", server.url, "--env", SUMS, "--group", "4", "--parallel", "2"]
    command = [sys.executable, "-m", "openclaw_rl", "rollout", *flags]
    server.seconds = 60
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    wait_for(lambda: server.running == 2)
    driver.send_signal(signal.SIGINT)
    out, errors = driver.communicate(timeout=60)
    assert (driver.returncode, errors) == (1, "")
    assert "Stopped." in out
    assert "0 rewarded" in out
    assert [body["error"] for body in server.reported] == [STOPPED] * 4


@pytest.mark.more
def test_a_driver_that_is_killed_leaves_no_trace_in_the_next(server: EpisodeServer) -> None:
    """Two runs of the same command never share a session or a group: the killed one may have left half of each."""
    flags = ["--url", server.url, "--env", SUMS, "--tasks", "1", "--group", "2", "--parallel", "2"]
    server.seconds = 60
    driver = subprocess.Popen([sys.executable, "-m", "openclaw_rl", "rollout", *flags], cwd=ROOT)
    wait_for(lambda: server.running == 2)
    driver.kill()
    driver.wait()
    left = set(server.requests)
    server.seconds = 0
    assert main(["rollout", *flags]) == 0
    assert not left & server.rewards.keys()


@pytest.mark.more
def test_the_server_of_a_killed_command_stops(tiny_model: Path, tmp_path: Path) -> None:
    flags = ["--env", SUMS, "--own-server", "--model-name", str(tiny_model), "--run-dir", str(tmp_path)]
    driver = subprocess.Popen([sys.executable, "-m", "openclaw_rl", "rollout", *flags], cwd=ROOT)
    wait_for(lambda: bool(read_server(tmp_path)))
    driver.kill()
    driver.wait()
    wait_for(lambda: not read_server(tmp_path))
