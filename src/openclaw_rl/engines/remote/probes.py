"""Finds out at the start whether a server gives raw log-probs and can read the learner's policies, and tidies it."""

import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.remote.dialect import Dialect
from openclaw_rl.engines.remote.http import RequestRefused
from openclaw_rl.engines.remote.replica import Replica
from openclaw_rl.types import SampleRequest, SamplingParams, ScoreRequest

#: Log-probs at this temperature differ from raw ones by far more than two computations of the same number do.
TEMPERATURE = 0.3
MAX_LOGPROB_ERROR = 0.05
PROMPT = [1, 2, 3, 4]
#: Where vLLM and SGLang list the base model and the loaded adapters with their folders.
MODELS = "/v1/models"


async def check_raw(dialect: Dialect, replica: Replica) -> None:
    """Raise EngineUnavailable unless the log-probs of samples are those of the raw distribution."""
    assert replica.traits is not None
    server = replica.server
    traits = replica.traits
    model = replica.traits.base_model
    request = SampleRequest(PROMPT, SamplingParams(max_tokens=4, temperature=TEMPERATURE, seed=1))
    async with replica.answering(replica.times.probe):
        tokens = [token async for piece in dialect.sample(server, traits, model, request, 0) for token in piece.tokens]
        ids = [*PROMPT, *(token.token_id for token in tokens)]
        scores = (await dialect.score(server, traits, model, ScoreRequest(ids, len(tokens)))).scores
        largest_gap = max(abs(token.logprob - score) for token, score in zip(tokens, scores.logprobs, strict=True))
    if largest_gap > MAX_LOGPROB_ERROR:
        raise EngineUnavailable(
            f"{server.url} gives log-probs that depend on the temperature, and learning needs raw ones: "
            f"start it with {dialect.raw_logprobs_need}."
        )


async def unload_leftovers(dialect: Dialect, replica: Replica, policies: Path) -> None:
    """Unload the policies that this run left on the server when it was killed. Nobody else writes into its folder."""
    async with replica.answering(replica.times.probe):
        for model in (await replica.server.get(MODELS))["data"]:
            if model.get("parent") and Path(model.get("root") or "/").is_relative_to(policies):
                await dialect.unload(replica.server, model["id"])


async def check_adapters(dialect: Dialect, replica: Replica, name: str, model: Path, policies: Path, rank: int) -> None:
    """Raise EngineUnavailable unless the server can load an adapter of this rank from the folder of policies."""
    policies.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".probe-", dir=policies))
    try:
        write_zero_adapter(model, folder, rank)
        async with replica.answering(replica.times.load):
            await dialect.load(replica.server, name, folder.resolve())
            await dialect.unload(replica.server, name)
    except RequestRefused as error:
        raise EngineUnavailable(
            f"{replica.server.url} cannot load adapters of rank {rank} from {policies}, where the learner writes them: "
            f"{error}. The server needs {dialect.needs}; one on another machine has to see the same path."
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_zero_adapter(model: Path, folder: Path, rank: int) -> None:
    """An adapter that changes nothing, in PEFT's format: it has the first layer's query projection only."""
    folder.mkdir(exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    out = heads * (config.get("head_dim") or hidden // heads)
    path = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    factors = {"A": np.zeros((rank, hidden), np.float32), "B": np.zeros((out, rank), np.float32)}
    save_file({path.format(side): factor for side, factor in factors.items()}, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": ["q_proj"]}))
