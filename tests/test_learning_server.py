"""The whole program learning from its users: real processes, HTTP, kill -9."""

import asyncio
import contextlib
import json
import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file

from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.learn.checkpoints import Checkpoints
from openclaw_rl.ledger.schema import FILE, connect
from support.commands import run_command
from support.server_program import SECONDS, SERVE, Program, serving, until
from support.tiny_models import save_tiny_mixture

LEARN = ("--method", "rl", "--judge", "feedback", "--batch-size", "2", "--save-interval", "2", "--lora-rank", "4")
FAST = ("--learning-rate", "1e-3", "--max-kl", "100", "--kv-cache-gib", "0.1", "--max-staleness", "1000")
ROUNDS = 2
ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}


@contextlib.contextmanager
def learning(model: Path, run_dir: Path, *flags: str) -> Iterator[Program]:
    with serving(SERVE, model, "--run-dir", str(run_dir), *LEARN, *FAST, *flags) as program:
        yield program


def ask(program: Program, **given: Any) -> dict[str, Any]:
    answer = httpx.post(f"{program.url}/v1/chat/completions", json={**ASK, **given}, timeout=60)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def praise(program: Program, id: str, score: int = 1) -> None:
    answer = httpx.post(f"{program.url}/v1/feedback", json={"id": id, "score": score}, timeout=60)
    assert answer.status_code == 200, answer.text


def teach(program: Program, count: int = 2) -> None:
    """So many answers, and what somebody thinks of them."""
    for number in range(count):
        praise(program, ask(program)["id"], 1 if number % 2 else -1)


def version(program: Program) -> int:
    return int(httpx.get(f"{program.url}/readyz", timeout=60).json()["policy_version"])


def version_of(answer: dict[str, Any]) -> int:
    return int(answer["system_fingerprint"].removeprefix("policy-"))


def command(run_dir: Path, *arguments: str) -> str:
    code, out, err = run_command(run_dir, *arguments)
    assert code == 0, err
    return out


def status(run_dir: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(command(run_dir, "status", "--json"))
    return told


def rows(run_dir: Path, query: str) -> list[tuple[Any, ...]]:
    with contextlib.closing(connect(run_dir / FILE, readonly=True)) as db:
        return [tuple(row) for row in db.execute(query)]


def applied(run_dir: Path) -> list[int]:
    query = "SELECT turn FROM update_turns JOIN updates USING (number) WHERE outcome = 'applied'"
    return sorted(turn for (turn,) in rows(run_dir, query))


def states(run_dir: Path) -> Counter[str]:
    return Counter(state for (state,) in rows(run_dir, "SELECT state FROM turns"))


def test_it_learns_while_it_serves_saves_when_it_is_stopped_and_goes_back_when_it_is_told_to(
    tiny_model: Path, tmp_path: Path
) -> None:
    # Two ranks are to be nothing special.
    with learning(tiny_model, tmp_path, "--learner-ranks", "2", "--device", "cpu") as program:
        stop, versions = threading.Event(), set()

        def talk(seed: int) -> int:
            """Ask all the time; no request may fail, whatever goes on beside it."""
            asked = 0
            while not stop.is_set():
                versions.add(version_of(ask(program, seed=seed + asked)))
                asked += 1
                time.sleep(0.2)  # leaves cores for learning
            return asked

        with ThreadPoolExecutor(3) as pool:
            talking = [pool.submit(talk, 1000 * number) for number in range(2)]
            try:
                # One that began before a swap ends on the policy it began with.
                with httpx.stream(
                    "POST", f"{program.url}/v1/chat/completions", json={**ASK, "max_tokens": 400, "stream": True}
                ) as answer:
                    events = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
                    first = next(events)
                    teach(program)
                    prints = {event["system_fingerprint"] for event in events}
                assert prints == {first["system_fingerprint"]} == {"policy-0"}
                for expected in (1, 2, 3):
                    until(lambda expected=expected: version(program) >= expected, program)
                    if expected < 3:
                        teach(program)
            finally:
                stop.set()
            assert all(future.result() > 0 for future in talking)
        assert version_of(ask(program)) == 3
        assert {0, 3} <= versions | {3}
        told = status(tmp_path)
        assert (told["step"], told["policy_version"], told["turns"]["applied"]) == (3, 3, 6)
        assert "judged turns that a step needs" in told["learner"]
        assert told["runs"]["learner"] == "local, 2 ranks on cpu"
        note = httpx.post(f"{program.url}/v1/notes", json={"text": "Call me Chef."}, timeout=60).json()["id"]
        practice = f"{program.url}/v1/notes/{note}/practice"
        assert httpx.post(practice, timeout=60).json()["state"] == "waiting"
        assert status(tmp_path)["practice"]["note"] == note
        assert httpx.delete(practice, timeout=60).json()["state"] == "stopped"
        httpx.delete(f"{program.url}/v1/notes/{note}", timeout=60)
        assert told["guard"] == {}, "this server has --no-guard"
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
        assert program.metric("openclaw_step_version") == 3
        assert "step-000002-v2" in command(tmp_path, "checkpoints")
        old = load_file(tmp_path / "checkpoints" / "step-000002-v2" / "adapter_model.safetensors")
        # A policy that was saved serves again at once, under a number of its own; learning goes on from it.
        assert "The server now serves policy 4 (the weights of step 2)." in command(tmp_path, "rollback")
        assert version_of(ask(program)) == 4
        assert status(tmp_path)["policy_version"] == 4
        teach(program)
        until(lambda: version(program) == 5, program)
        # Other users of the machine can read nothing of it.
        assert [path for path in (tmp_path, *tmp_path.rglob("*")) if path.stat().st_mode & 0o077] == []
        program.process.terminate()
        assert program.process.wait(SECONDS) == 0
        assert "Traceback" not in program.log
    # Step 3 was left behind; the step after going back was saved at the end.
    checkpoints = Checkpoints(tmp_path / "checkpoints", 3)
    latest = checkpoints.latest()
    assert latest is not None
    assert (latest.step, latest.version) == (3, 5)
    assert [outcome for (outcome,) in rows(tmp_path, "SELECT outcome FROM updates ORDER BY number")] == [
        "applied",
        "applied",
        "rolled_back",
        "applied",
    ]
    # Without a server the next start serves what was gone back to. That of step 2 is known by its new number.
    assert "serves policy 6" in command(tmp_path, "rollback", "4")
    with learning(tiny_model, tmp_path) as program:
        assert version_of(ask(program)) == 6
        last = checkpoints.latest()
        assert last is not None
        new = load_file(last.folder / "adapter_model.safetensors")
        assert (last.step, last.version) == (2, 6)
        assert all(old[name].equal(new[name]) for name in old)
        assert "The server now serves policy 7 (the base model)." in command(tmp_path, "rollback", "0")
        assert version_of(ask(program)) == 7
        base = checkpoints.latest()
        assert base is not None
        added = load_file(base.folder / "adapter_model.safetensors")
        assert not any(added[name].any() for name in added if "lora_B" in name)
    code, _out, refusal = run_command(tmp_path, "rollback", "77")
    assert code == 2
    assert "no checkpoint of policy version 77" in " ".join(refusal.split())


@pytest.mark.more
def test_the_guard_says_what_it_found_and_examines_what_it_does_not_know_after_a_kill(
    tiny_model: Path, tmp_path: Path
) -> None:
    def found(program: Program) -> dict[str, Any]:
        return httpx.get(f"{program.url}/readyz", timeout=60).json()["guard"] or {"policy_version": None}

    with learning(tiny_model, tmp_path, "--guard") as program:
        teach(program)
        until(lambda: found(program)["policy_version"] == 1, program)
        ready = found(program)
        assert (ready["asked"], ready["last_good"], ready["worse"], ready["cautious"]) == (33, 1, "", ""), (
            "one is its own"
        )
        assert {"sensible", "tokens", "faulty", "distance", "perplexity"} <= ready.keys()
        assert program.metric("openclaw_guard_tokens") == ready["tokens"] > 1
        (checkpoint,) = Checkpoints(tmp_path / "checkpoints", 3).all()
        assert (checkpoint.version, checkpoint.for_guard) == (1, True)
        assert status(tmp_path)["guard"] == ready
        said = f"olicy 1 gave {ready['passed']} sensible answers to 33 plain prompts"
        assert f"Guard: p{said}" in " ".join(command(tmp_path, "status").split())
        assert f"P{said}" in httpx.get(f"{program.url}/dashboard/learning", timeout=60).text
        teach(program)
        until(lambda: version(program) == 2, program)
        *_, step = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        assert step["guard_tokens"] == ready["tokens"]
        assert "Traceback" not in program.log
    # It was killed, and the next start has not examined policy 2 yet.
    with learning(tiny_model, tmp_path, "--guard") as program:
        until(lambda: found(program)["policy_version"] == 2, program)
        assert "Guard: policy 2 gave" in command(tmp_path, "checkpoints")
        assert "The guard has set no turns aside." in command(tmp_path, "relearn")
    assert "The guard has set no turns aside." in command(tmp_path, "relearn")


@pytest.mark.more
def test_turns_are_forgotten_and_the_others_trained_on_again(tiny_model: Path, tmp_path: Path) -> None:
    with learning(tiny_model, tmp_path, "--keep-checkpoints", "5") as program:
        for step in (1, 2, 3, 4):
            teach(program)
            until(lambda step=step: version(program) == step, program)
        (secret,) = rows(
            tmp_path, "SELECT id FROM sessions JOIN turns ON session = sessions.number WHERE turns.number = 5"
        )
        before = load_file(tmp_path / "checkpoints" / "step-000002-v2" / "adapter_model.safetensors")
        told = command(tmp_path, "forget", "--session", secret[0])
        assert "Training steps that had used them: 3." in told
        assert "policy 4, which serves" in told
        assert "openclaw-rl rollback 2" in told
        told = command(tmp_path, "forget", "--retrain")
        assert "Deleted 1 checkpoint and 2 policies" in told
        assert "The server now serves policy 5" in told
        # The other turn of step 3 and those of step 4: one step is made, and one turn waits for another.
        until(lambda: version(program) == 6, program)
        assert version_of(ask(program)) == 6
        teach(program, 1)
        until(lambda: version(program) == 7, program)
        program.process.terminate()
        assert program.process.wait(SECONDS) == 0
        assert "Traceback" not in program.log
    turns = [turn for (turn,) in rows(tmp_path, "SELECT number FROM turns WHERE state = 'applied' ORDER BY number")]
    assert applied(tmp_path) == turns
    assert len(turns) == 8
    assert 5 not in turns
    steps = [checkpoint.folder.name for checkpoint in Checkpoints(tmp_path / "checkpoints", 5).all()]
    assert steps == ["step-000002-v2", "step-000004-v7"]
    kept = load_file(tmp_path / "checkpoints" / "step-000002-v2" / "adapter_model.safetensors")
    assert all(before[name].equal(kept[name]) for name in before)
    # Without a server: the first turns are forgotten too, so that only the base model is left.
    told = command(tmp_path, "forget", "--user", "anyone", "--retrain")
    assert "The next start serves policy 8" in told
    with learning(tiny_model, tmp_path) as program:
        assert version_of(ask(program)) in (0, 9)
        until(lambda: version(program) == 9, program)
        assert status(tmp_path)["step"] == 0


@pytest.mark.more
def test_all_weights_are_learned_served_and_gone_on_from(tiny_model: Path, tmp_path: Path) -> None:
    with learning(tiny_model, tmp_path, "--lora-rank", "0") as program:
        teach(program, 4)
        until(lambda: version(program) == 2, program)
        assert version_of(ask(program)) == 2
        program.process.terminate()
        assert program.process.wait(SECONDS) == 0
        assert "Traceback" not in program.log
    latest = Checkpoints(tmp_path / "checkpoints", 3).latest()
    assert latest is not None
    base, learned = (load_file(folder / "model.safetensors") for folder in (tiny_model, latest.folder))
    assert all(not base[name].equal(learned[name]) for name in base if "proj" in name)
    # What was learned serves also where nothing more is to be learned, or recorded.
    with learning(tiny_model, tmp_path, "--lora-rank", "0", "--max-steps", "0", "--no-capture") as program:
        assert version_of(ask(program)) == 2


@pytest.mark.more
@pytest.mark.parametrize("flags", [["--quantize", "4bit"], ["--lora-experts"]])
def test_an_adapter_on_weights_of_4_bits_or_on_experts_is_learned_served_and_gone_on_from(
    tiny_model: Path, tmp_path: Path, flags: list[str]
) -> None:
    model = save_tiny_mixture(tiny_model, tmp_path / "mixture") if "--lora-experts" in flags else tiny_model
    with learning(model, tmp_path, *flags) as program:
        teach(program, 4)
        until(lambda: version(program) == 2, program)
        assert version_of(ask(program)) == 2
        program.process.kill()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    gaps = [line["logprob_gap"] for line in lines if "logprob_gap" in line]
    assert gaps
    assert max(gaps) < 1e-4
    with learning(model, tmp_path, *flags) as program:
        assert version_of(ask(program)) == 2
        teach(program, 2)
        until(lambda: version(program) == 3, program)


@pytest.mark.more
def test_likeliest_tokens_are_distilled_under_hints_and_recorded(tiny_model: Path, tmp_path: Path) -> None:
    with learning(tiny_model, tmp_path, "--method", "topk-select", "--topk-k", "3", "--record") as program:
        for _ in range(2):
            answer = ask(program, logprobs=True, top_logprobs=1)
            named = [len(token["top_logprobs"]) for token in answer["choices"][0]["logprobs"]["content"]]
            assert set(named) == {1}, "what is recorded is not the client's"
            feedback = {"id": answer["id"], "score": -1, "text": "Please answer in one short sentence."}
            assert httpx.post(f"{program.url}/v1/feedback", json=feedback, timeout=60).status_code == 200
        until(lambda: version(program) == 1, program)
        assert version_of(ask(program)) == 1
    (step,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert step["opd_rl"] == 2
    assert 0 <= step["overlap"] <= 1
    assert step["left_out"] == 0
    records = [json.loads(line) for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert [record["hints"][0]["chosen"] for record in records] == [1.0, 1.0]
    shares = [record["hints"][0]["overlap"] / 3 for record in records]
    assert step["overlap"] == pytest.approx(sum(shares) / 2)
    for record in records:
        assert {len(row) for row in record["d"]} == {3}
        assert len(record["d"]) == len(record["response"]) == len(record["overlaps"][0])
        assert [sum(row) for row in record["w"]] == pytest.approx([1.0] * len(record["w"]))
    page = tmp_path / "report.html"
    command(tmp_path, "report", "--no-answers", "--out", str(page))
    assert "of the 3 likeliest tokens in common, taught 100% of the response" in page.read_text()
    (session,) = {
        row
        for (row,) in rows(
            tmp_path, "SELECT id FROM sessions JOIN turns ON session = sessions.number WHERE turns.number = 1"
        )
    }
    command(tmp_path, "forget", "--session", session)
    kept = [json.loads(line)["turn"] for line in (tmp_path / "records.jsonl").read_text().splitlines()]
    assert 1 not in kept


@pytest.mark.more
def test_killed_at_random_instants_every_turn_is_trained_on_exactly_once(tiny_model: Path, tmp_path: Path) -> None:
    draw = random.Random(5)
    for _round in range(ROUNDS):
        with learning(tiny_model, tmp_path) as program:
            served = version(program)
            latest = Checkpoints(tmp_path / "checkpoints", 3).latest()
            assert served >= (latest.version if latest else 0)
            # The last two are trained on while it is killed, or after the next start.
            teach(program, 4)
            until(lambda before=served: version(program) > before, program)
            time.sleep(draw.uniform(0, 0.3))
            program.process.kill()
            program.process.wait()
    with learning(tiny_model, tmp_path) as program:
        judged = 4 * ROUNDS
        until(lambda: states(tmp_path)["applied"] == judged, program)
        until(lambda: "judged turns that a step needs" in status(tmp_path)["learner"], program)
        program.process.terminate()
        assert program.process.wait(SECONDS) == 0
    turns = applied(tmp_path)
    assert len(turns) == len(set(turns)) == judged
    assert turns == sorted(n for (n,) in rows(tmp_path, "SELECT number FROM turns WHERE state = 'applied'"))
    latest = Checkpoints(tmp_path / "checkpoints", 3).latest()
    assert latest is not None
    told = status(tmp_path)
    assert (latest.step, latest.version) == (told["step"], told["policy_version"])
    assert latest.step == judged // 2
    learner = json.loads((latest.folder / "learner.json").read_text())
    assert learner["steps"] == judged // 2
    known = [version for (version,) in rows(tmp_path, "SELECT version FROM updates")]
    assert len(set(known)) == len(known)


@pytest.mark.more
def test_a_checkpoint_that_cannot_be_used_is_said_in_a_sentence_at_the_start(tiny_model: Path, tmp_path: Path) -> None:
    line = [*SERVE, "--model-name", str(tiny_model), "--run-dir", str(tmp_path), "--proxy-port", "0", *LEARN]
    done = subprocess.run(
        [*line, "--resume-from-ckpt", "/nowhere"], capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 2
    assert "--resume-from-ckpt" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.more
def test_a_checkpoint_of_an_adapter_is_not_gone_on_from_with_all_weights(tiny_model: Path, tmp_path: Path) -> None:
    decoder = load_decoder(tiny_model, torch.float32, torch.device("cpu"))
    adapter = LoraWeights.create(decoder.shape, rank=4, alpha=8)

    async def write(folder: Path) -> None:
        adapter.save(folder, "tiny")

    asyncio.run(Checkpoints(tmp_path / "checkpoints", 3).save(1, 1, [], write))
    line = [*SERVE, "--model-name", str(tiny_model), "--run-dir", str(tmp_path), "--proxy-port", "0", *LEARN]
    done = subprocess.run([*line, "--lora-rank", "0"], capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode != 0
    refusal = " ".join(done.stderr.split())
    assert "holds a PEFT adapter, and this sampler loads a model with all its weights. Give the --lora-rank" in refusal
    assert "Traceback" not in done.stderr
