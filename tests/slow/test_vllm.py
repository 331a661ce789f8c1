"""vLLM loads what the learner writes, and says with it what our own sampler says. Run by `make test-vllm`.

OPENCLAW_RL_VLLM names a Python that has vLLM: it wants an environment of its own.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.process.sampler_worker import Worker
from openclaw_rl.engines.local.process.worker_messages import Add, LoadPolicy, WorkerOptions
from openclaw_rl.engines.local.training.lora import LoraWeights
from openclaw_rl.models import fetch_model
from openclaw_rl.types import SampledToken, SampleRequest, SamplingParams
from support.other_servers import started
from support.server_program import free_port

VLLM = os.environ.get("OPENCLAW_RL_VLLM", "")
PROMPT = [504, 6330, 282, 260, 2591, 357, 451, 260, 3505, 282]
TOKENS = 12
START_SECONDS = 400

pytestmark = pytest.mark.skipif(not VLLM, reason="OPENCLAW_RL_VLLM names no Python with vLLM")


@pytest.fixture(scope="module")
def model() -> Path:
    return fetch_model(None, Path(os.environ.get("OPENCLAW_RL_CACHE", "~/.cache/openclaw-rl")).expanduser())


@pytest.fixture(scope="module")
def adapter(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy as the learner writes it, far enough from the base model to say something else."""
    shape = load_decoder(model, torch.float32, torch.device("cpu")).shape
    lora = LoraWeights.create(shape, rank=16, alpha=32, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for up in lora.b.values():
            up.normal_(0, 0.02, generator=generator)
    folder = tmp_path_factory.mktemp("adapter")
    lora.save(folder, "base")
    return folder


@pytest.fixture(scope="module")
def url(model: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port = free_port()
    line = [VLLM, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "base"]
    line += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager", "--port", str(port)]
    line += ["--enable-lora", "--max-lora-rank", "16", "--lora-modules", f"learned={adapter}"]
    log = tmp_path_factory.mktemp("vllm") / "log"
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"}
    with started(line, f"http://127.0.0.1:{port}/health", log, START_SECONDS, environment):
        yield f"http://127.0.0.1:{port}"


def theirs(url: str, name: str) -> tuple[list[str], list[float]]:
    body = {"model": name, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "logprobs": 0}
    told = httpx.post(f"{url}/v1/completions", json={**body, "return_tokens_as_token_ids": True}, timeout=300).json()
    found = told["choices"][0]["logprobs"]
    return found["tokens"], found["token_logprobs"]


def ours(model: Path, adapter: Path | None) -> list[SampledToken]:
    decoder = load_decoder(model, torch.float32, torch.device("cpu"))
    worker = Worker(decoder, WorkerOptions(model, "cpu", "float32", 4, None, 0.2, 2, 16))
    if adapter:
        worker.obey(LoadPolicy(1, 1, adapter))
    request = SampleRequest(PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0.0))
    worker.obey(Add(1, request, int(bool(adapter)), int(bool(adapter))))
    tokens = []
    while not worker.scheduler.idle:
        tokens += worker.step().tokens.get(1, [])
    return tokens


def test_vllm_says_with_the_adapter_what_we_say(url: str, model: Path, adapter: Path) -> None:
    said = {}
    for name, folder in (("base", None), ("learned", adapter)):
        own = ours(model, folder)
        tokens, logprobs = theirs(url, name)
        assert tokens == [f"token_id:{token.token_id}" for token in own]
        assert logprobs == pytest.approx([token.logprob for token in own], abs=2e-2)
        said[name] = tokens
    assert said["base"] != said["learned"]
