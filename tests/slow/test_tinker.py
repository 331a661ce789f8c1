"""The whole loop on a real self-hosted Tinker server, SkyRL tx on a CPU. Run by `make test-tinker` (20 minutes).

OPENCLAW_RL_TINKER names a Python that has the server, OPENCLAW_RL_TINKER_SDK a folder with the SDK it was made for:
both want other versions than the tests' own environment has. OPENCLAW_RL_TINKER_URL names one that runs already.
The model is a tiny one, because this server compiles its kernels for every new length and takes minutes for it on a
CPU. OPENCLAW_RL_TINKER_MODEL names another: a model's folder, or `embedded` for the embedded model (more than an hour).
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import pytest

from openclaw_rl.learn.checkpoints import Checkpoints
from openclaw_rl.ledger.schema import FILE, connect
from openclaw_rl.ledger.turns import load_turn
from openclaw_rl.models import EMBEDDED
from openclaw_rl.types import StoredTurn
from support.other_servers import started
from support.server_program import ROOT, SERVE, Program, free_port, serving
from support.tiny_models import save_tiny_model

SERVER = os.environ.get("OPENCLAW_RL_TINKER", "")
SDK = os.environ.get("OPENCLAW_RL_TINKER_SDK", "")
RUNNING = os.environ.get("OPENCLAW_RL_TINKER_URL", "")
MODEL = os.environ.get("OPENCLAW_RL_TINKER_MODEL", "")
START_SECONDS = 300
#: Kernels are compiled for every new length: a minute each on two idle cores, five on busy ones.
STEP_SECONDS = 900
FLAGS = ("--batch-size", "2", "--save-interval", "1", "--lora-rank", "8", "--learning-rate", "3e-4", "--max-kl", "100")
FLAGS += ("--tinker-timeout", str(STEP_SECONDS))
HINT = "Answer in one short sentence and name the city first."
QUESTIONS = ("What is the capital of France?", "What is the capital of Italy?", "Where is the Eiffel Tower?")

pytestmark = pytest.mark.skipif(not SERVER or not SDK, reason="OPENCLAW_RL_TINKER names no Python with the server")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    if MODEL:
        return EMBEDDED if MODEL == "embedded" else MODEL
    return str(save_tiny_model(tmp_path_factory.mktemp("models") / "tiny"))


@pytest.fixture(scope="module")
def url(model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if RUNNING:
        yield RUNNING
        return
    folder, port = tmp_path_factory.mktemp("tinker"), free_port()
    line = [sys.executable, "examples/tinker_server.py", "--python", SERVER, "--port", str(port), "--data", str(folder)]
    line += ["--model", model] if model != EMBEDDED else []
    with started(line, f"http://127.0.0.1:{port}/api/v1/healthz", folder / "log", START_SECONDS):
        yield f"http://127.0.0.1:{port}"


@pytest.fixture(autouse=True)
def environment(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the documentation sets it up; `serving` passes it on."""
    monkeypatch.setenv("TINKER_BASE_URL", url)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'src'}:{SDK}")


def ask(program: Program, question: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 32, **more}
    answer = httpx.post(f"{program.url}/v1/chat/completions", json=body, timeout=STEP_SECONDS)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def teach(program: Program, method: str) -> None:
    """Two answers, and what somebody thinks of them; the wish is a hint."""
    for number, question in enumerate(QUESTIONS[:2]):
        said = {"score": 1} if method == "rl" and number == 0 else {"score": -1, "text": HINT}
        id = ask(program, question, seed=number)["id"]
        answer = httpx.post(f"{program.url}/v1/feedback", json={"id": id, **said}, timeout=60)
        assert answer.status_code == 200, answer.text


def version(program: Program) -> int:
    return int(httpx.get(f"{program.url}/readyz", timeout=60).json()["policy_version"])


def wait_for(program: Program, wanted: int) -> int:
    """Until a policy version serves; the answers that were given meanwhile, none of which may fail."""
    end, given = time.monotonic() + STEP_SECONDS, 0
    while version(program) < wanted:
        assert program.process.poll() is None, program.log
        assert time.monotonic() < end, program.log
        ask(program, QUESTIONS[2])
        given += 1
        time.sleep(2)
    return given


def report(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("method", ["rl", "opd", "combine"])
def test_it_serves_learns_swaps_and_goes_on_after_being_killed(method: str, model: str, tmp_path: Path) -> None:
    began, lines = time.monotonic(), []

    def lap(what: str) -> None:
        lines.append(f"{time.monotonic() - began:6.0f} s  {what}")

    with serving(SERVE, Path(model), "--run-dir", str(tmp_path), "--method", method, *FLAGS) as program:
        lap("ready")
        pieces = list(stream(program, QUESTIONS[2]))
        assert len(pieces) > 1
        lap(f"the first answer, in {len(pieces)} pieces")
        for wanted in (1, 2):
            teach(program, method)
            lap(f"batch {wanted} asked and judged")
            served = wait_for(program, wanted)
            lap(f"policy {wanted} serves; {served} answers were given meanwhile")
        assert ask(program, QUESTIONS[0])["system_fingerprint"] == "policy-2"
        until_saved(tmp_path, 2)
        program.process.kill()
        program.process.wait()
        assert "Traceback" not in program.log
    lap("killed")
    with serving(SERVE, Path(model), "--run-dir", str(tmp_path), "--method", method, *FLAGS) as program:
        assert ask(program, QUESTIONS[0])["system_fingerprint"] == "policy-2"
        lap("started again and answering with policy 2")
        teach(program, method)
        wait_for(program, 3)
        lap("policy 3 serves")
        program.process.terminate()
        assert program.process.wait(120) == 0
        assert "Traceback" not in program.log
    steps = report(tmp_path)
    assert [step["step"] for step in steps] == [1, 2, 3]
    trained = turns(tmp_path)
    assert len(trained) == len(set(trained)) == 6
    latest = Checkpoints(tmp_path / "checkpoints", 3).latest()
    assert latest is not None
    assert json.loads((latest.folder / "learner.json").read_text())["steps"] == 3
    assert json.loads((latest.folder / "learner.json").read_text())["state"].startswith("tinker://")
    moved = movement(model, tmp_path, latest.folder, trained)
    gain = moved[0]
    lap(f"advantage times change of log-prob, a token: {moved.pop(0):.3g}; change by its sign: {moved}")
    sys.stderr.write(f"\n--tinker {method}\n" + "\n".join([*lines, *map(json.dumps, steps)]) + "\n")
    assert gain > 0


def stream(program: Program, question: str) -> Iterator[str]:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 64, "stream": True}
    with httpx.stream("POST", f"{program.url}/v1/chat/completions", json=body, timeout=STEP_SECONDS) as answer:
        for line in answer.iter_lines():
            event = json.loads(line[6:]) if line.startswith("data: {") else {}
            assert "error" not in event, line
            if event and event["choices"][0]["delta"].get("content"):
                yield line


def until_saved(run_dir: Path, wanted: int) -> None:
    end = time.monotonic() + 120
    while True:
        latest = Checkpoints(run_dir / "checkpoints", 3).latest()
        if latest is not None and latest.version >= wanted:
            return
        assert time.monotonic() < end
        time.sleep(0.5)


def turns(run_dir: Path) -> list[int]:
    query = "SELECT turn FROM update_turns JOIN updates USING (number) WHERE outcome = 'applied'"
    with connect(run_dir / FILE, readonly=True) as db:
        return sorted(row[0] for row in db.execute(query))


def movement(model: str, run_dir: Path, checkpoint: Path, trained: list[int]) -> dict[int, float]:
    """How the log-probs of trained tokens changed, by the sign of the advantage; at 0 the mean of their product."""
    with connect(run_dir / FILE, readonly=True) as db:
        stored = [load_turn(db, number) for number in trained]
    program = f"""
import asyncio, json, sys
from pathlib import Path
from openclaw_rl.engines.base import policy_in
from openclaw_rl.engines.tinker.connection import Account, Connection
from openclaw_rl.engines.tinker.sampler import SamplerOptions, TinkerSampler
from openclaw_rl.types import ScoreRequest

async def main():
    connection = Connection(Account({os.environ["TINKER_BASE_URL"]!r}, "", 600.0))
    sampler = TinkerSampler(connection, SamplerOptions({model!r}, Path("unused"), None, 4, 4, 32, 2))
    await sampler.start()
    await sampler.publish(1, policy_in(Path({str(checkpoint)!r})))
    found = []
    for ids, last in json.load(sys.stdin):
        found.append([(await sampler.score(ScoreRequest(ids, last, version=v))).logprobs for v in (0, 1)])
    await connection.close()
    print(json.dumps(found))

asyncio.run(main())
"""
    asked = [([*turn.prompt_ids, *turn.response_ids], len(turn.response_ids)) for turn in stored]
    scoring = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(asked), capture_output=True, text=True, check=False
    )
    assert scoring.returncode == 0, scoring.stderr
    moves: dict[int, list[float]] = {}
    for turn, (base, learned) in zip(stored, json.loads(scoring.stdout), strict=True):
        for signal, before, after in zip(signals(turn), base, learned, strict=True):
            moves.setdefault(0, []).append(signal * (after - before))
            if signal:
                moves.setdefault(1 if signal > 0 else -1, []).append(after - before)
    return {sign: fmean(changes) for sign, changes in moves.items()}


def signals(turn: StoredTurn) -> list[float]:
    """What each token was to learn: the teacher's gap where there is a hint, else the score."""
    assert turn.verdict is not None
    hint = next((hint for hint in turn.verdict.hints if hint.logprobs), None)
    score = turn.verdict.score or 0.0
    if turn.sample is not None and "opd" in turn.sample.value and hint is not None:
        reward = score if "rl" in turn.sample.value else 0.0
        return [teacher - own + reward for teacher, own in zip(hint.logprobs, turn.logprobs, strict=True)]
    return [score] * len(turn.response_ids)
