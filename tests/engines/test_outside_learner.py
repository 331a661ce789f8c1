"""--learner outside and --learner slime: what is refused, what is said, and the whole program with such a trainer."""

import asyncio
import contextlib
import itertools
import shlex
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from openclaw_rl.app.checks import check
from openclaw_rl.app.config import Config, load
from openclaw_rl.app.console import learning
from openclaw_rl.cli import main
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.factory import Resources
from openclaw_rl.engines.remote.outside_weights import OutsideWeightsSampler
from openclaw_rl.engines.remote.sampler import RemoteSampler
from openclaw_rl.errors import UserError
from support.inference_servers import ServerDouble
from support.server_program import SERVE, serving, until

URL = "http://127.0.0.1:30100"
SLIME = {"learner": "slime", "sampler": "sglang", "sglang_url": URL, "judge": "feedback", "method": "rl"}


def config(folder: Path, **given: Any) -> Config:
    return load({**SLIME, "run_dir": str(folder), **given}, environment={}).config


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sglang_url": ""}, "--learner slime needs servers that run already.*--sampler sglang --sglang-url"),
        ({"sampler": "vllm", "vllm_url": URL}, "--learner slime needs.*--sampler sglang"),
        ({"sampler": "local"}, "--learner slime needs servers"),
        ({"learner": "outside", "sampler": "local"}, "--sampler sglang --sglang-url URL or --sampler vllm --vllm-url"),
        (
            {"method": "topk-select", "teacher_url": URL},
            "--method topk-select also trains on tokens.*rl, opd or combine",
        ),
        ({"method": "opd"}, "--learner slime with --sampler sglang holds one policy version.*--teacher-url"),
        ({"gate": "examples/gate.jsonl"}, "--gate cannot examine a candidate.*learner of this program"),
        ({"resume_from_ckpt": "none"}, "--resume-from-ckpt belongs to a learner of this program"),
        ({"custom_loss_function_path": "examples/custom_loss.py"}, "--custom-loss-function-path belongs to"),
        ({"lora_experts": True}, "--lora-experts belongs to a learner of this program"),
        ({"train_epochs": 2}, "--train-epochs: slime makes one pass"),
        ({"loss_fn": "cispo"}, "--loss-fn cispo: slime's loss is ppo"),
        ({"learner": "local", "sampler": "local", "sglang_url": "", "teacher_url": URL}, "--teacher-url names servers"),
        ({"teacher_url": "nowhere"}, "--teacher-url nowhere is not a server's URL"),
    ],
)
def test_what_an_outside_trainer_cannot_do_is_refused_in_a_sentence(
    tiny_model: Path, tmp_path: Path, given: dict[str, Any], said: str
) -> None:
    with pytest.raises((UserError, ConfigError), match=said):
        check(config(tmp_path, model_name=str(tiny_model), **given))


@pytest.mark.parametrize("method", ["rl", "opd", "combine"])
def test_methods_of_sampled_tokens_are_accepted(tiny_model: Path, tmp_path: Path, method: str) -> None:
    settings = config(tmp_path, model_name=str(tiny_model), method=method, teacher_url=URL)
    check(settings)
    line = learning(settings)
    assert "slime trains outside" in line
    assert all(word in line for word in ("undo", "gate", "candidates", "top-k"))


def test_a_dry_run_prints_slimes_command_line(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--learner", "slime", "--sampler", "sglang", "--sglang-url", URL, "--teacher-url", URL]
    flags += ["--judge", "feedback", "--method", "combine", "--batch-size", "16", "--train-gpus", "6"]
    flags += ["--model-name", str(tiny_model), "--run-dir", str(tmp_path), "--slime-args", "--sglang-mem-fraction 0.8"]
    assert main(["serve", "--no-environment", "--dry-run", *flags]) == 0
    printed = capsys.readouterr().out
    words = shlex.split(printed.partition("The trainer is started with:")[2])
    assert words[:3] == ["ray", "job", "submit"]
    pairs = dict(itertools.pairwise(words))
    assert pairs["--rollout-function-path"] == "openclaw_rl.integrations.slime.generate_rollout"
    assert (pairs["--actor-num-gpus-per-node"], pairs["--rollout-num-gpus"]) == ("6", "2")
    assert (pairs["--rollout-batch-size"], pairs["--global-batch-size"]) == ("16", "16")
    assert pairs["--sglang-router-port"] == "30100"
    assert pairs["--lr"] == "1e-06", "slime trains all weights"
    assert pairs["--opd-kl-coef"] == "1"
    assert pairs["--sglang-mem-fraction"] == "0.8"
    assert {"--use-opd", "--use-rollout-logprobs", "--disable-rewards-normalization"} <= set(words)
    assert "${MODEL_ARGS[@]}" in words


async def test_the_teacher_has_servers_of_its_own(tiny_model: Path, tmp_path: Path) -> None:
    settings = config(tmp_path, model_name=str(tiny_model), method="opd", teacher_url="http://127.0.0.1:30200")
    made = {}
    async with contextlib.AsyncExitStack() as stack:
        for name, of in (("policy", settings.engine_settings), ("teacher", settings.engine_settings.for_teacher())):
            sampler = settings.sampler.open(of, Resources(stack), tiny_model, "tiny")
            assert isinstance(sampler, RemoteSampler)
            made[name] = (type(sampler), [replica.server.url for replica in sampler.replicas])
    assert made == {"policy": (OutsideWeightsSampler, [URL]), "teacher": (RemoteSampler, ["http://127.0.0.1:30200"])}


@contextlib.contextmanager
def inference_server() -> Iterator[ServerDouble]:
    """A vLLM server without a model, in a thread."""
    server, begun, ended = ServerDouble(), threading.Event(), threading.Event()

    async def run() -> None:
        await server.start()
        begun.set()
        await asyncio.to_thread(ended.wait)
        await server.stop()

    # It cancels what is left and closes the loop.
    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert begun.wait(60)
        yield server
    finally:
        ended.set()
        thread.join()


@pytest.mark.more
def test_the_whole_program_serves_while_a_trainer_outside_learns(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with inference_server() as server:
        flags = ("--learner", "outside", "--sampler", "vllm", "--vllm-url", server.url, "--method", "combine")
        flags += ("--judge", "feedback", "--batch-size", "2", "--run-dir", str(tmp_path), "--teacher-url", server.url)
        with serving(SERVE, tiny_model, *flags) as program:

            def post(path: str, **body: Any) -> dict[str, Any]:
                answer = httpx.post(f"{program.url}/v1/{path}", json=body, timeout=60)
                assert answer.status_code == 200, answer.text
                said: dict[str, Any] = answer.json()
                return said

            def ready() -> dict[str, Any]:
                said: dict[str, Any] = httpx.get(f"{program.url}/readyz", timeout=60).json()
                return said

            def waiting_for() -> str:
                assert main(["status", "--run-dir", str(tmp_path)]) == 0
                return " ".join(capsys.readouterr().out.split())

            until(lambda: "is ready" in program.log, program)
            assert "no undo or rollback, no gate, no candidates, no top-k" in program.log
            for score in (1, -1):
                asked = post("chat/completions", messages=[{"role": "user", "content": f"hi {score}"}], max_tokens=3)
                assert asked["system_fingerprint"] == "policy-1"
                post(
                    "feedback",
                    id=asked["id"],
                    score=score,
                    text="Too long! Answer in one sentence." if score < 0 else "",
                )
            until(lambda: ready()["queue"]["to_train"] == 2, program)
            assert "The trainer is outside: 2 judged turns wait for outside to claim them" in waiting_for()
            claim = post("training/claim", wait_seconds=10)
            assert [turn["reward"] for (turn,) in claim["groups"]] == [1.0, -1.0]
            # The double scores every token alike.
            assert [turn["teacher_log_probs"] for (turn,) in claim["groups"]] == [None, [-0.5] * 3]
            assert {turn["weight_version"] for (turn,) in claim["groups"]} == {"default"}
            assert "outside claimed 2 turns" in waiting_for()
            server.model.weights = "2"
            assert post("training/confirm", lease=claim["lease"])["step"] == 1
            asked = post("chat/completions", messages=[{"role": "user", "content": "hi"}], max_tokens=3)
            assert asked["system_fingerprint"] == "policy-2"
            assert "step 1, policy version 2" in waiting_for()
