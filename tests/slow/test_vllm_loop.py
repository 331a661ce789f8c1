"""The whole loop on real vLLM servers with the embedded model. Run by `make test-vllm`.

All tests share one server that runs already. The test of a server of our own starts another.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from openclaw_rl.engines.base import policy_in
from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.engines.remote.http import InferenceServer
from openclaw_rl.engines.remote.sampler import RemoteOptions, RemoteSampler
from openclaw_rl.engines.remote.vllm import VllmDialect
from openclaw_rl.models import fetch_model
from openclaw_rl.types import SampleRequest, SamplingParams
from support.other_servers import started
from support.real_vllm import ENVIRONMENT, HEAD_SIZE, START_SECONDS, VLLM, vllm_command
from support.server_program import SERVE, Program, free_port, serving, until
from support.tiny_models import save_tiny_model

SEQUENCES, RANK, POLICIES, CONTEXT = 16, 8, 4, 1024
#: vLLM and our learner compute the same log-probs in float32, in another order: the mean difference, and the largest
#: one of 99% of the tokens.
MAX_MEAN_GAP, MAX_P99_GAP = 1e-3, 1e-2
#: Without notes, so that the same question is always the same prompt.
LEARN = ("--sampler", "vllm", "--judge", "feedback", "--batch-size", "2", "--save-interval", "1", "--no-notes")
FAST = ("--lora-rank", str(RANK), "--learning-rate", "3e-4", "--max-kl", "100", "--max-staleness", "1000")
QUESTIONS = ("What is the capital of France?", "What is the capital of Italy?", "Where is the Eiffel Tower?")
HINT = "Answer in one short sentence and name the city first."
SECONDS = 600

pytestmark = pytest.mark.skipif(not VLLM, reason="OPENCLAW_RL_VLLM names no Python with vLLM")


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch_model(None, Path(os.environ.get("OPENCLAW_RL_CACHE", "~/.cache/openclaw-rl")).expanduser())


@contextlib.contextmanager
def vllm(model: Path, port: int, folder: Path) -> Iterator[str]:
    """A vLLM server that does not belong to our program."""
    command = vllm_command(model, port, sequences=SEQUENCES, rank=RANK, policies=POLICIES)
    url = f"http://127.0.0.1:{port}"
    with started(
        [*command, "--max-model-len", str(CONTEXT)],
        f"{url}/health",
        folder / f"{port}-{time.time_ns()}.log",
        START_SECONDS,
        {**ENVIRONMENT, "OMP_NUM_THREADS": "2"},
    ):
        yield url


@pytest.fixture(scope="module")
def url(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm(model, free_port(), tmp_path_factory.mktemp("vllm")) as url:
        yield url


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Policies as the learner writes them, each far enough from the base model to say something else."""
    shape = load_decoder(model, torch.float32, torch.device("cpu")).shape
    folders = []
    for seed in range(3):
        lora = LoraWeights.create(shape, rank=RANK, alpha=2 * RANK, seed=seed)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for up in lora.b.values():
                up.normal_(0, 0.02, generator=generator)
        folders.append(tmp_path_factory.mktemp("adapter"))
        lora.save(folders[-1], "base")
    return folders


def post(program: Program, messages: list[dict[str, str]], **given: Any) -> httpx.Response:
    body = {"messages": messages, "max_tokens": 24, **given}
    return httpx.post(f"{program.url}/v1/chat/completions", json=body, timeout=SECONDS)


def ask(program: Program, question: str, **given: Any) -> dict[str, Any]:
    answer = post(program, [{"role": "user", "content": question}], **given)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def pieces(program: Program, question: str) -> list[str]:
    """The pieces of a streamed answer."""
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": 24, "stream": True}
    with httpx.stream("POST", f"{program.url}/v1/chat/completions", json=body, timeout=SECONDS) as answer:
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]
    return [event["choices"][0]["delta"]["content"] for event in events if event["choices"][0]["delta"].get("content")]


def give_feedback(program: Program, id: str, score: int, text: str | None = None) -> None:
    body = {"id": id, "score": score, **({"text": text} if text else {})}
    answer = httpx.post(f"{program.url}/v1/feedback", json=body, timeout=SECONDS)
    assert answer.status_code == 200, answer.text


def teach(program: Program, method: str) -> None:
    """Two answers with feedback. The text of the feedback is a hint."""
    for number, question in enumerate(QUESTIONS[:2]):
        praised = method == "rl" and number == 0
        give_feedback(
            program, ask(program, question, seed=number)["id"], 1 if praised else -1, None if praised else HINT
        )


def ready(program: Program) -> dict[str, Any]:
    told: dict[str, Any] = httpx.get(f"{program.url}/readyz", timeout=SECONDS).json()
    return told


def until_version(program: Program, version: int) -> None:
    until(lambda: ready(program)["policy_version"] >= version, program)


def steps(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def show(title: str, lines: list[str]) -> None:
    sys.stderr.write("\n".join([f"\n-- {title}", *lines, ""]))


@pytest.mark.parametrize("method", ["rl", "opd", "combine", "topk-select"])
def test_it_serves_learns_and_goes_on_after_being_killed(method: str, model: Path, url: str, tmp_path: Path) -> None:
    began, laps = time.monotonic(), []

    def lap(event: str) -> None:
        laps.append(f"{time.monotonic() - began:6.1f} s  {event}")

    flags = (*LEARN, *FAST, "--method", method, "--vllm-url", url, "--run-dir", str(tmp_path))
    with serving(SERVE, model, *flags) as program:
        lap("ready")
        assert len(pieces(program, QUESTIONS[2])) > 1
        for version in (1, 2):
            teach(program, method)
            lap(f"batch {version} answered and judged")
            until_version(program, version)
            lap(f"policy {version} serves")
        assert ask(program, QUESTIONS[0])["system_fingerprint"] == "policy-2"
        program.process.kill()
        program.process.wait()
        assert "Traceback" not in program.log
    with serving(SERVE, model, *flags) as program:
        lap("started again after kill -9")
        assert ask(program, QUESTIONS[0])["system_fingerprint"] == "policy-2"
        teach(program, method)
        until_version(program, 3)
        lap("policy 3 serves")
        program.process.terminate()
        assert program.process.wait(SECONDS) == 0
        assert "Traceback" not in program.log
    reports = steps(tmp_path)
    gaps = [(report["logprob_gap"], report["logprob_gap_p99"]) for report in reports]
    show(method, [*laps, *(f"log-prob gap {mean:.2e}, p99 {p99:.2e}" for mean, p99 in gaps)])
    assert [report["step"] for report in reports] == [1, 2, 3]
    assert all(mean < MAX_MEAN_GAP and p99 < MAX_P99_GAP for mean, p99 in gaps)
    # A run that ended in order leaves nothing on the server.
    models = httpx.get(f"{url}/v1/models", timeout=SECONDS).json()["data"]
    assert [found["id"] for found in models] == ["base"]


@pytest.fixture
async def sampler(model: Path, url: str, tmp_path: Path) -> AsyncIterator[RemoteSampler]:
    options = RemoteOptions(model, None, SEQUENCES, SEQUENCES, POLICIES, RANK, tmp_path)
    sampler = RemoteSampler(VllmDialect(), [(InferenceServer(url), None)], options)
    await sampler.start()
    yield sampler
    await sampler.close()


async def test_base_two_versions_and_a_candidate_share_a_batch(sampler: RemoteSampler, adapters: list[Path]) -> None:
    for version, folder in enumerate(adapters, 1):
        await sampler.publish(version, policy_in(folder), candidate=version == 3)
    assert sampler.newest_version == 2
    prompt = [504, 6330, 282, 260, 2591, 357, 451, 260, 3505, 282]
    arrivals: list[int] = []

    async def sample(version: int) -> list[int]:
        request = SampleRequest(prompt, SamplingParams(max_tokens=32, temperature=0.0), version=version)
        ids = []
        async for tokens in sampler.sample(request):
            arrivals.append(version)
            ids += [token.token_id for token in tokens]
        return ids

    alone = [await sample(version) for version in range(4)]
    arrivals.clear()
    together = await asyncio.gather(*(sample(version) for version in range(4)))
    assert together == alone
    assert len({tuple(ids) for ids in alone}) == 4
    # All four were sampled at the same time: none was finished before the last began.
    begun = max(arrivals.index(version) for version in range(4))
    assert all(arrivals[begun:].count(version) > 16 for version in range(4))


def served_requests(url: str) -> float:
    """The requests that a vLLM server has finished."""
    lines = httpx.get(f"{url}/metrics", timeout=SECONDS).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:request_success_total"))


def test_two_servers_are_one_sampler_and_a_session_stays_with_its_server(model: Path, url: str, tmp_path: Path) -> None:
    port, flags = free_port(), (*LEARN, *FAST, "--method", "rl", "--run-dir", str(tmp_path / "run"))
    with (
        vllm(model, port, tmp_path) as second,
        serving(SERVE, model, *flags, "--vllm-url", f"{url},{second}") as program,
    ):
        assert set(ready(program)["servers"]) == {url, second}
        before = [served_requests(each) for each in (url, second)]
        shares = []
        sessions = [
            [{"role": "user", "content": f"Story {number}: " + f"Once upon a time there were {number} frogs. " * 12}]
            for number in range(6)
        ]
        for turn in range(3):
            for messages in sessions:
                answer = post(program, messages).json()
                if turn:
                    usage = answer["usage"]
                    shares.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
                content = answer["choices"][0]["message"]["content"]
                messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on."}]
        counts = [served_requests(each) - old for each, old in zip((url, second), before, strict=True)]
        show("two servers", [f"requests {counts}", f"cached share of follow-up prompts: {min(shares):.2f} or more"])
        assert sum(counts) == 18
        assert min(counts) == 9
        assert min(shares) > 0.5
        # A version serves when both have it.
        teach(program, "rl")
        until_version(program, 1)
        for each in (url, second):
            names = [found["id"] for found in httpx.get(f"{each}/v1/models", timeout=SECONDS).json()["data"]]
            assert any(name.endswith("-v1") for name in names)


def test_a_server_of_our_own_that_is_killed_under_load_comes_back_and_no_turn_is_lost(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    flags = (*LEARN, *FAST, "--method", "rl", "--run-dir", str(tmp_path), "--max-context-tokens", str(CONTEXT))
    began = time.monotonic()
    with serving(
        SERVE, model, *flags, "--vllm-python", VLLM, "--vllm-args", "--enforce-eager --block-size 32"
    ) as program:
        laps = [f"{time.monotonic() - began:6.1f} s to the start"]
        teach(program, "rl")
        until_version(program, 1)
        # This turn waits for another one when the server dies.
        give_feedback(program, ask(program, QUESTIONS[0])["id"], 1)
        with ThreadPoolExecutor(8) as pool:
            asked = [{"role": "user", "content": "Count as far as you can."}]
            running = [pool.submit(post, program, asked, max_tokens=600, seed=seed) for seed in range(8)]
            until(lambda: program.metric("openclaw_active_sequences") == 8, program)
            killed = time.monotonic()
            os.kill(server_of(program), signal.SIGKILL)
            answers = [future.result() for future in running]
        laps.append(f"{time.monotonic() - killed:6.1f} s from kill -9 to the last of 8 answers")
        assert {answer.status_code for answer in answers} == {503}
        assert all(answer.json()["error"]["message"] for answer in answers)
        # Without a server the next request waits.
        answer = ask(program, QUESTIONS[1])
        laps.append(f"{time.monotonic() - killed:6.1f} s from kill -9 to the next answer")
        assert answer["system_fingerprint"] == "policy-1"
        give_feedback(program, answer["id"], -1)
        until_version(program, 2)
        assert program.metric("openclaw_engine_restarts") == 1
        process = server_of(program)
        program.process.kill()
        program.process.wait()
    show("a server of our own", laps)
    assert len(steps(tmp_path)) == 2
    end = time.monotonic() + SECONDS
    while Path(f"/proc/{process}").exists():
        assert time.monotonic() < end, "vLLM outlived our program"
        time.sleep(0.1)


def test_all_weights_are_replaced_on_a_server_of_our_own_and_come_back_after_kill_9(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gap of the second step shows that vLLM has every weight of the first one. The tiny model has a head of its
    own, as vLLM needs it on a CPU."""
    model = save_tiny_model(tmp_path / "model", head_size=HEAD_SIZE)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    flags = (*LEARN, *FAST, "--lora-rank", "0", "--learning-rate", "1e-3", "--method", "rl")
    own = ("--vllm-python", VLLM, "--vllm-args", "--enforce-eager --block-size 32", "--run-dir", str(tmp_path / "run"))
    began, laps = time.monotonic(), []
    with serving(SERVE, model, *flags, *own, "--max-context-tokens", "400") as program:
        laps.append(f"{time.monotonic() - began:6.1f} s to the start")
        assert "one policy version at a time" in program.log
        before = ask(program, QUESTIONS[0], temperature=0, logprobs=True)
        teach(program, "rl")
        with ThreadPoolExecutor(4) as pool:
            running = [pool.submit(ask, program, "Count as far as you can.", max_tokens=200) for _ in range(4)]
            until_version(program, 1)
            answers = [future.result() for future in running]
        assert {answer["system_fingerprint"] for answer in answers} <= {"policy-0", "policy-1"}
        after = ask(program, QUESTIONS[0], temperature=0, logprobs=True)
        assert (before["system_fingerprint"], after["system_fingerprint"]) == ("policy-0", "policy-1")
        assert logprobs(before) != logprobs(after)
        killed = time.monotonic()
        os.kill(server_of(program), signal.SIGKILL)
        until(lambda: program.metric("openclaw_engine_restarts") == 1, program)
        again = ask(program, QUESTIONS[0], temperature=0, logprobs=True)
        laps.append(f"{time.monotonic() - killed:6.1f} s from kill -9 to the next answer")
        assert again["system_fingerprint"] == "policy-1"
        assert logprobs(again) == pytest.approx(logprobs(after), abs=1e-4)
        teach(program, "rl")
        until_version(program, 2)
        # The base model is a version like others.
        rolled_back = httpx.post(f"{program.url}/v1/policy/rollback", json={"version": 0}, timeout=SECONDS)
        assert rolled_back.status_code == 200, rolled_back.text
        assert rolled_back.json()["policy_version"] == 3
        assert logprobs(ask(program, QUESTIONS[0], temperature=0, logprobs=True)) == pytest.approx(
            logprobs(before), abs=1e-4
        )
        program.process.terminate()
        assert program.process.wait(SECONDS) == 0
        assert "Traceback" not in program.log
    reports = steps(tmp_path / "run")
    gaps = [(report["logprob_gap"], report["logprob_gap_p99"]) for report in reports]
    show("all weights", [*laps, *(f"log-prob gap {mean:.2e}, p99 {p99:.2e}" for mean, p99 in gaps)])
    assert all(mean < MAX_MEAN_GAP and p99 < MAX_P99_GAP for mean, p99 in gaps)


def logprobs(answer: dict[str, Any]) -> list[float]:
    return [token["logprob"] for token in answer["choices"][0]["logprobs"]["content"]]


def server_of(program: Program) -> int:
    """The process of the program's own vLLM server: the child of its guard."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if b"openclaw_rl.engines.remote.guard" in words and parent == program.process.pid:
                (server,) = (folder / "task" / folder.name / "children").read_text().split()
                return int(server)
    raise AssertionError("the program has no server of its own")
