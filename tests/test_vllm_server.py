"""The whole program with a vLLM server of its own: it serves, learns, and outlives the server. vLLM is a double here;
`make test-vllm` runs the same on the real one."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from support.server_program import SERVE, Program, serving, until

LEARN = ("--sampler", "vllm", "--judge", "feedback", "--method", "rl", "--batch-size", "2", "--lora-rank", "4")
FAST = ("--learning-rate", "1e-3", "--max-kl", "100", "--max-staleness", "1000", "--max-context-tokens", "200")
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An interpreter whose vLLM is the double."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    file = tmp_path / "python-with-vllm"
    file.write_text(
        f'#!/bin/sh\n[ "$1" = "-c" ] && exit 0\nshift 2\nexec {sys.executable} -m support.vllm_double "$@"\n'
    )
    file.chmod(0o755)
    return file


def ask(program: Program, key: str = "") -> dict[str, Any]:
    answer = httpx.post(f"{program.url}/v1/chat/completions", json=ASK, headers=of(key), timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def ready(program: Program) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{program.url}/readyz", timeout=60).json()
    return told


def vllm_pids() -> list[int]:
    """The servers' processes, not their guards, whose command lines have the same words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"support.vllm_double" in words and b"openclaw_rl.engines.remote.guard" not in words:
                found.append(int(folder.name))
    return found


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.more
def test_it_serves_learns_and_goes_on_when_its_vllm_or_the_guard_dies(
    tiny_model: Path, tmp_path: Path, interpreter: Path
) -> None:
    run_dir = tmp_path / "run"
    flags = (*LEARN, *FAST, "--run-dir", str(run_dir), "--vllm-python", str(interpreter))
    with serving(SERVE, tiny_model, *flags) as program:
        assert len(ready(program)["servers"]) == 1
        for score in (1, -1):
            body = {"id": ask(program)["id"], "score": score}
            assert httpx.post(f"{program.url}/v1/feedback", json=body, timeout=60).status_code == 200
        until(lambda: ready(program)["policy_version"] == 1, program)
        assert ask(program)["system_fingerprint"] == "policy-1"
        metrics = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        assert metrics["logprob_gap"] < 1e-3
        assert metrics["logprob_gap"] <= metrics["logprob_gap_p99"] < 1e-3
        (vllm,) = vllm_pids()
        os.kill(vllm, signal.SIGKILL)
        until(lambda: program.metric("openclaw_engine_restarts") == 1 and ready(program)["ready"], program)
        assert ask(program)["system_fingerprint"] == "policy-1"
        assert program.metric("openclaw_engine_servers_up") == 1
        (vllm,) = vllm_pids()
        os.kill(parent_of(vllm), signal.SIGKILL)
        until(lambda: program.metric("openclaw_engine_restarts") == 2 and ready(program)["ready"], program)
        assert ask(program)["system_fingerprint"] == "policy-1"
        assert len(vllm_pids()) == 1
    # If the program was killed, the guard still needs a moment.
    end = time.monotonic() + 30
    while vllm_pids():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.more
def test_each_person_has_a_line_on_a_vllm_server(tiny_model: Path, tmp_path: Path, interpreter: Path) -> None:
    flags = (*LEARN, *FAST, "--run-dir", str(tmp_path / "run"), "--vllm-python", str(interpreter), "--no-guard")
    keys = ("--policy-per-user", "--policy-slots", "2", "--admin-key", "sk-admin")
    with serving(SERVE, tiny_model, *flags, *keys, "--api-key", "anna=sk-anna,ben=sk-ben,carl=sk-carl") as program:
        people = ("sk-anna", "sk-ben", "sk-carl")
        for key in people:
            for score in (1, -1):
                body = {"id": ask(program, key)["id"], "score": score}
                posted = httpx.post(f"{program.url}/v1/feedback", json=body, headers=of(key), timeout=60)
                assert posted.status_code == 200
            until(lambda key=key: ask(program, key)["system_fingerprint"] != "policy-0", program)  # type: ignore[misc]
        served = {key: ask(program, key)["system_fingerprint"] for key in people}
        assert len(set(served.values())) == 3
        for _ in range(2):
            assert {key: ask(program, key)["system_fingerprint"] for key in people} == served
        (vllm,) = vllm_pids()
        os.kill(vllm, signal.SIGKILL)
        until(lambda: vllm not in (found := vllm_pids()) and bool(found), program)
        assert {key: ask(program, key)["system_fingerprint"] for key in people} == served
