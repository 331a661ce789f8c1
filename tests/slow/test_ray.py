"""A server on a real Ray cluster of one node: submitted as a job, with a killed rank. Run by `make test-ray`."""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.learn.checkpoints import Checkpoints
from openclaw_rl.ledger.run_dir import read_server
from support.server_program import ROOT, free_port

pytestmark = pytest.mark.skipif("OPENCLAW_RL_RAY" not in os.environ, reason="make test-ray runs it")

RAY = Path(sys.executable).with_name("ray")
NODE = "127.0.0.1"
#: Logical CPUs: one each for a sampler and two ranks, and one to spare.
CPUS = 4
OBJECT_STORE = 80_000_000
#: The longest wait for a cluster, a job, a step or their end.
SECONDS = 240
JOB = "openclaw-rl-test"
LEARN = ("--method", "rl", "--judge", "feedback", "--batch-size", "2", "--save-interval", "1", "--lora-rank", "4")
FAST = ("--learning-rate", "1e-3", "--max-kl", "100", "--kv-cache-gib", "0.1", "--max-staleness", "1000")
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


def until(condition: Callable[[], bool], what: str, log: Callable[[], str]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, f"waited {SECONDS} seconds for {what} in vain: {log()}"
        time.sleep(0.2)


class Cluster:
    """A running cluster, and the programs to talk to it."""

    def __init__(self, address: str, dashboard: str, environment: dict[str, str]) -> None:
        self.address, self.dashboard, self.environment = address, dashboard, environment

    def jobs(self, *words: str) -> str:
        """The output of `ray job …`."""
        command = [str(RAY), "job", words[0], "--address", self.dashboard, *words[1:]]
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=ROOT
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def job(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.dashboard}/api/jobs/{JOB}", timeout=60).json()
        return answer

    def logs(self) -> str:
        return self.jobs("logs", JOB)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The head of a cluster as a process of ours, which ends with all that it started."""
    port, dashboard = free_port(), free_port()
    # Ray's sockets need short paths.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "RAY_USAGE_STATS_ENABLED": "0", "RAY_TMPDIR": folder}
    # Ray's own niceness leaves little room: in a niced run nobody could be nicer than the sampler.
    environment["RAY_worker_niceness"] = "0"
    command = [str(RAY), "start", "--head", "--block", f"--node-ip-address={NODE}", f"--port={port}"]
    command += [f"--num-cpus={CPUS}", f"--object-store-memory={OBJECT_STORE}", f"--temp-dir={folder}"]
    command += ["--include-dashboard=true", f"--dashboard-port={dashboard}", "--disable-usage-stats"]
    with tempfile.TemporaryFile("w+") as output:
        head = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)

        def said() -> str:
            output.seek(0)
            return output.read()

        def is_up() -> bool:
            assert head.poll() is None, said()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"http://{NODE}:{dashboard}/api/version", timeout=10).status_code == 200
            return False

        try:
            until(is_up, "the cluster", said)
            yield Cluster(f"{NODE}:{port}", f"http://{NODE}:{dashboard}", environment)
        finally:
            head.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(60)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(head.pid, signal.SIGKILL)
            end_processes_of(folder)
            shutil.rmtree(folder, ignore_errors=True)


def processes() -> Iterator[tuple[int, str]]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield int(path.parent.name), path.read_bytes().replace(b"\0", b" ").decode(errors="replace")


def end_processes_of(folder: str) -> None:
    """Kill what a cluster has left behind: its processes name its folder."""
    for pid, command in processes():
        if folder in command and pid != os.getpid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def actors() -> dict[int, int]:
    """Process ids of our workers on the cluster, with their niceness."""
    return {
        pid: os.getpriority(os.PRIO_PROCESS, pid) for pid, name in processes() if name.startswith("ray::WorkerActor")
    }


def ranks() -> set[int]:
    """Those of the learner, which are nicer than the sampler."""
    nice = actors()
    return {pid for pid, value in nice.items() if value > min(nice.values())}


def teach(url: str) -> None:
    for score in (1, -1):
        answer = httpx.post(f"{url}/v1/chat/completions", json=ASK, timeout=SECONDS)
        assert answer.status_code == 200, answer.text
        feedback = {"id": answer.json()["id"], "score": score}
        assert httpx.post(f"{url}/v1/feedback", json=feedback, timeout=60).status_code == 200


def test_a_job_serves_learns_survives_the_death_of_a_rank_and_ends_in_order(
    cluster: Cluster, tiny_model: Path, tmp_path: Path
) -> None:
    runtime_env = {"env_vars": {"PYTHONPATH": str(ROOT / "src"), "RAY_JOB_STOP_WAIT_TIME_S": "120"}}
    serve = [
        sys.executable,
        "-m",
        "openclaw_rl",
        "serve",
        "--launcher",
        "ray",
        "--learner-ranks",
        "2",
        "--device",
        "cpu",
    ]
    serve += ["--model-name", str(tiny_model), "--run-dir", str(tmp_path), "--proxy-port", "0", *LEARN, *FAST]
    settings = ["--submission-id", JOB, "--runtime-env-json", json.dumps(runtime_env)]
    cluster.jobs("submit", "--no-wait", *settings, "--", *serve)

    def ready() -> dict[str, Any]:
        assert cluster.job()["status"] in ("PENDING", "RUNNING"), cluster.logs()
        url = read_server(tmp_path).get("url")
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{url}/readyz", timeout=60) if url else None
            if answer is not None and answer.status_code == 200:
                state: dict[str, Any] = answer.json()
                return state
        return {}

    until(lambda: bool(ready()), "the server", cluster.logs)
    url = str(read_server(tmp_path)["url"])
    for version in (1, 2):
        teach(url)
        until(lambda version=version: ready().get("policy_version") == version, f"step {version}", cluster.logs)
    runs = ready()["runs"]
    placed = re.match(r"local on cpu at (\S+), float32", runs["sampler"])
    assert placed, runs
    # Ray has an address of its own for this machine.
    socket.create_server((placed[1], 0)).close()
    assert runs["learner"] == f"local, 2 ranks on cpu at {placed[1]}"
    before = ranks()
    assert len(before) == 2
    os.kill(max(before), signal.SIGKILL)
    teach(url)
    until(lambda: ready().get("policy_version") == 3, "a step after the death", cluster.logs)
    assert len(ranks()) == 2
    assert not ranks() & before
    assert ready()["runs"] == runs
    cluster.jobs("stop", JOB)
    until(lambda: cluster.job()["status"] == "STOPPED", "the end of the job", cluster.logs)
    until(lambda: not actors(), "the end of the actors", cluster.logs)
    latest = Checkpoints.of_run(tmp_path, 1).latest()
    assert latest is not None
    assert (latest.step, latest.version) == (3, 3)
    assert "Traceback" not in cluster.logs()


def test_a_cluster_without_room_is_refused_in_a_sentence(cluster: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    """It takes no work away from those who have room: the server waits, says so, and ends when it is told to."""
    serve = [sys.executable, "-m", "openclaw_rl", "serve", "--launcher", "ray", "--ray-cpus", "9", "--device", "cpu"]
    serve += ["--model-name", str(tiny_model), "--run-dir", str(tmp_path), "--proxy-port", "0"]
    serve += ["--ray-address", cluster.address]
    with tempfile.TemporaryFile("w+") as output:
        server = subprocess.Popen(serve, env=cluster.environment, stdout=output, stderr=output, cwd=ROOT)

        def said() -> str:
            output.seek(0)
            return output.read()

        try:
            until(lambda: "The sampler needs CPU 9, and the Ray cluster has CPU 4" in said(), "the sentence", said)
            server.terminate()
            assert server.wait(60) == 0, said()
            assert "Traceback" not in said()
        finally:
            server.kill()
            server.wait()
