"""--device mps, as far as it can be tried without an Apple GPU: the path that it takes, and what it refuses.

And a server on a machine that lacks what only Linux has.
"""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from openclaw_rl.app.config import Config
from openclaw_rl.app.split import parts_of
from openclaw_rl.cli import main
from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.local.factory import check_device
from openclaw_rl.engines.local.model.placement import find_device, free_memory, placement
from openclaw_rl.engines.local.model.shared_weights import share
from openclaw_rl.engines.local.model.transformers_decoder import load_language_model
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, LoadPolicy, PolicyLoaded, WorkerOptions
from openclaw_rl.engines.local.sampling.runner import TorchRunner
from openclaw_rl.types import SampledToken
from support.pretended_gpu import MPS, PretendedGpu
from support.server_program import SERVE, serving, until
from support.tiny_models import save_tiny_gemma
from support.trainers import InProcessLearner, batch, fresh, options
from support.workers import request, run

GIB = 1 << 30


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: GIB)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: GIB // 4)
    with PretendedGpu():
        yield


def sampled(model: Path, adapter: Path, device: torch.device) -> list[SampledToken]:
    decoder, shared = share(load_language_model(model, torch.float32, device, compare=True))
    worker = Worker(decoder, WorkerOptions(model, device.type, "float32", 8, None, 0.02, 4, 4))
    assert isinstance(worker.runner, TorchRunner)
    worker.scheduler.prefill_tokens = 20  # small, so that prompts take several steps
    assert decoder.embed.device == device
    # Tensors of an Apple GPU cannot be opened by another process.
    assert (shared is None) == (device == MPS)
    assert worker.obey(LoadPolicy(1, 1, adapter)) == PolicyLoaded(1)
    prompt = random.Random(0).choices(range(3, 200), k=40)
    jobs = [{"temperature": 1.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.0, "top_logprobs": 3}]
    adds = [
        (i, Add(i, request(prompt, seed=i, **{"max_tokens": 4, **job}), i % 2, i % 2)) for i, job in enumerate(jobs)
    ]
    return [token for _, tokens in sorted(run(worker, adds).items()) for token in tokens]


@pytest.mark.parametrize("family", ["our decoder", pytest.param("transformers", marks=pytest.mark.more)])
@pytest.mark.usefixtures("gpu")
def test_a_policy_is_served_and_trained_as_on_a_cpu(
    family: str, tiny_model: Path, adapters: list[Path], tmp_path: Path
) -> None:
    model = tiny_model if family == "our decoder" else save_tiny_gemma(tiny_model, tmp_path / "gemma")
    answers, trained = [], []
    for device in (torch.device("cpu"), MPS):
        answers.append(sampled(model, adapters[0], device))
        decoder = load_language_model(model, torch.float32, device)
        learner = InProcessLearner(decoder, options(model=model, device=device.type))
        sequences = batch(learner)
        learner.step(sequences)
        learner.save(tmp_path / device.type)
        learner.reset()
        learner.load(tmp_path / device.type)
        learner.step(fresh(learner, sequences))
        trained.append([factor.tolist() for factor in learner.trainer.weights.parameters()])
        assert learner.trainer.device == device
    assert [one.token_id for one in answers[0]] == [one.token_id for one in answers[1]]
    logprobs = [[one.logprob for one in tokens] for tokens in answers]
    assert logprobs[1] == pytest.approx(logprobs[0], abs=1e-4)
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("gpu")
def test_tensors_of_two_devices_are_not_mixed_by_the_pretended_gpu() -> None:
    with pytest.raises(AssertionError, match="tensors of both devices"):
        torch.ones(2, device=MPS) + torch.ones(2)


@pytest.mark.usefixtures("gpu")
def test_memory_and_precision() -> None:
    assert free_memory(MPS) <= GIB - GIB // 4
    assert placement("mps", "auto") == (torch.device("mps"), torch.float32)
    assert placement("mps", "bfloat16") == (torch.device("mps"), torch.bfloat16)


def test_it_is_chosen_only_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert find_device("auto").type != "mps"
    check_device(LocalOptions(device="mps"))
    for given in ({"learner_ranks": "2"}, {"launcher": "ray"}):
        with pytest.raises(ConfigError, match="--device mps is one GPU of this machine"):
            check_device(LocalOptions.model_validate({"device": "mps", **given}))


def test_a_machine_without_one_says_so(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    flags = ["--model-name", str(tiny_model), "--run-dir", str(tmp_path / "run")]
    assert main(["serve", "--dry-run", "--no-environment", "--device", "mps", *flags]) == 2
    said = capsys.readouterr().err
    assert "--device mps needs an Apple GPU, and PyTorch finds none; use --device auto." in said
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert main(["serve", "--dry-run", "--no-environment", "--device", "mps", *flags]) == 0
    assert "has never run on one. Sampler and learner hold a copy" in " ".join(capsys.readouterr().out.split())


def test_the_learner_s_copy_of_the_weights_is_counted() -> None:
    def weights(device: str) -> list[float]:
        config = Config.of(model_name="Qwen/Qwen3-4B", device=device, dtype="bfloat16")
        return [part.memory.weights for part in parts_of(config) if part.memory]

    assert weights("cpu")[1] == 0
    assert weights("mps")[0] == weights("mps")[1] == weights("cpu")[0]


#: What Python on macOS does not have, and folders that are not there. Python runs it first in each process.
NOT_LINUX = """
import os, resource, select, signal, socket, sys
for module, names in (
    (os, "sched_getaffinity sched_setaffinity memfd_create posix_fadvise pidfd_open splice eventfd pipe2 unshare"),
    (select, "epoll"),
    (signal, "signalfd sigtimedwait sigwaitinfo pidfd_send_signal"),
    (socket, "AF_NETLINK AF_VSOCK AF_PACKET SO_PEERCRED SO_DOMAIN TCP_KEEPIDLE"),
    (resource, "prlimit RLIMIT_RTTIME RLIMIT_SIGPENDING"),
):
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)

def refuse(event, arguments):
    if event == "open" and str(arguments[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "this machine has no such folder", str(arguments[0]))

sys.addaudithook(refuse)
"""


@pytest.mark.more
def test_a_server_answers_and_learns_without_what_only_linux_has(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(NOT_LINUX)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'first'}:{os.environ.get('PYTHONPATH', '')}")
    flags = ("--method", "rl", "--judge", "feedback", "--batch-size", "2", "--lora-rank", "4", "--max-kl", "100")
    with serving(SERVE, tiny_model, "--run-dir", str(tmp_path / "run"), "--kv-cache-gib", "0.1", *flags) as program:
        for score in (1, -1):
            asked = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
            answer = httpx.post(f"{program.url}/v1/chat/completions", json=asked, timeout=60).json()
            httpx.post(f"{program.url}/v1/feedback", json={"id": answer["id"], "score": score}, timeout=60)
        until(lambda: httpx.get(f"{program.url}/readyz").json()["policy_version"] > 0, program)
        assert "Traceback" not in program.log
