"""vLLM: its requests and answers, and how its servers are started."""

import base64
import io
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from openclaw_rl.engines.base import EngineError, EngineUnavailable
from openclaw_rl.engines.factory import EngineSettings, MemoryShare
from openclaw_rl.engines.gpus import has_cuda
from openclaw_rl.engines.local.family_size import adaptable_names
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.remote.constrained import structural_tag
from openclaw_rl.engines.remote.dialect import SampledPiece, ServerScores, ServerTraits, salt_of, seed_of
from openclaw_rl.engines.remote.factory import (
    LOOPBACK,
    MAX_TOP_LOGPROBS,
    SPARE_ADAPTERS,
    RemoteSamplerFactory,
    precision,
)
from openclaw_rl.engines.remote.http import InferenceServer, InferenceServerGone, RequestRefused
from openclaw_rl.engines.remote.options import RemoteServers, VllmOptions
from openclaw_rl.types import (
    FinishReason,
    Numbers,
    Priority,
    SampledToken,
    SampleRequest,
    ScoreRequest,
    Scores,
    TopTokens,
)

GENERATE = "/inference/v1/generate"
LOAD = "/v1/load_lora_adapter"
UNLOAD = "/v1/unload_lora_adapter"
#: Mode `wait`: requests that run finish, and those that come wait until `/resume`.
PAUSE = "/pause?mode=wait"
RESUME = "/resume"
#: What vLLM calls weights that nobody has named.
UNNAMED_WEIGHTS = "default"
CALL_WORKERS = "/collective_rpc"
NAME_WEIGHTS = "/update_weight_version"
RESET_CACHE = "/reset_prefix_cache"
#: Numbers of likeliest tokens that are tried, in order to find out how many a server allows.
TOP_LOGPROBS = (257, 65, 33, 20, 10, 5, 1)
#: What vLLM writes for a log-prob that is missing or not a number.
UNKNOWN_LOGPROB = -9999.0
FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
#: The ranks that --max-lora-rank takes.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
#: The share of a GPU's memory that vLLM takes if the learner needs the same GPU.
SHARED_GPU = "0.45"
#: The key-value cache on a CPU, in GiB.
CPU_CACHE_GIB = 1.0


class VllmDialect:
    """Implements `Dialect` for vLLM's endpoint of token ids.

    * Log-probs are raw unless the server was told otherwise.
    * The sampled token stands first in `top_logprobs` and displaces the last of the likeliest ones, so one more is
      asked for.
    * The endpoint has no queue limit and takes a prompt of at most one token less than the context.
    """

    name = "vllm"
    health = "/health"
    needs = (
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, --enable-scale-out --enable-lora, and --max-lora-rank "
        "of at least --lora-rank"
    )
    reload_needs = "VLLM_SERVER_DEV_MODE=1 in its environment and --enable-scale-out, without --enable-lora"
    raw_logprobs_need = "--logprobs-mode raw_logprobs"

    async def probe(self, server: InferenceServer) -> ServerTraits:
        """A server that does not score chosen tokens runs on a CPU or is an old one. On a CPU, vLLM computes a request
        for the base model with the adapter that was loaded last if the batch has requests for adapters; and it keeps a
        packed copy of the head, which it makes again after a reload only if the head has a file of its own."""
        version = (await server.get("/version"))["version"]
        (base,) = await self._base_models(server)
        await self._check_generates(server, base["id"], version)
        scores_targets = await self._accepts(server, base["id"], prompt_logprob_token_ids=[[1]])
        return ServerTraits(
            product=f"vLLM {version}",
            base_model=base["id"],
            # Scoring needs one more token than it is given.
            max_context=base["max_model_len"] - 1,
            max_top_logprobs=await self._most_top_logprobs(server, base["id"]) - 1,
            scores_targets=scores_targets,
            prioritises=await self._accepts(server, base["id"], {"priority": 1}),
            mixes_base=scores_targets,
            replaces_tied_head=scores_targets,
        )

    async def sample(
        self, server: InferenceServer, traits: ServerTraits, model: str, request: SampleRequest, index: int
    ) -> AsyncIterator[SampledPiece]:
        params = request.params
        body = {
            **priority_of(request.priority, traits),
            **salt_of(request.owner),
            "model": model,
            "token_ids": list(request.prompt_ids),
            "stream": True,
            "stream_options": {"include_usage": True},
            "sampling_params": {
                "max_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "seed": seed_of(params.seed, index),
                "stop_token_ids": sorted(params.stop_token_ids),
                "ignore_eos": True,
                "logprobs": params.top_logprobs + 1 if params.top_logprobs else 0,
                "detokenize": False,
                **structured_outputs(request),
            },
        }
        last = SampledPiece([], None)
        async for event in server.stream(GENERATE, body):
            for choice in event.get("choices") or ():
                tokens = read_tokens(choice, index, params.top_logprobs)
                if choice.get("finish_reason") is None:
                    yield SampledPiece(tokens, None)
                else:
                    # The number of cached tokens comes after the last token; whoever reads the last one knows it then.
                    last = SampledPiece(tokens, None, weights_of(choice))
            if event.get("usage"):
                yield last._replace(cached_tokens=cached_tokens(event["usage"]))
                last = SampledPiece([], None)
        # A server that does not count tokens ends without the number.
        yield last

    async def score(
        self, server: InferenceServer, traits: ServerTraits, model: str, request: ScoreRequest
    ) -> ServerScores:
        params: dict[str, Any] = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": request.top_k}
        if request.targets is not None and traits.scores_targets:
            params["prompt_logprob_token_ids"] = request.targets.tolist()
            params["prompt_logprob_start"] = len(request.ids) - request.last_n - 1
        body = {"model": model, "token_ids": list(request.ids), "sampling_params": {**params, "detokenize": False}}
        answer = await server.post(
            GENERATE, {**body, **priority_of(request.priority, traits), **salt_of(request.owner)}
        )
        rows = answer["prompt_logprobs"][-request.last_n :]
        given = [known(row[str(id)]["logprob"]) for row, id in zip(rows, request.ids[-request.last_n :], strict=True)]
        packed = answer.get("prompt_token_id_logprobs")
        top = top_tokens(rows, request.top_k) if request.top_k else None
        weights = tuple(name for choice in answer.get("choices") or () for name in weights_of(choice))
        return ServerScores(Scores(given, top, packed and unpacked(packed)), weights)

    async def load(self, server: InferenceServer, model: str, folder: Path) -> None:
        await server.post(LOAD, {"lora_name": model, "lora_path": str(folder)})

    async def unload(self, server: InferenceServer, model: str) -> None:
        await server.post(UNLOAD, {"lora_name": model})

    async def reload(self, server: InferenceServer, weights: str, folder: Path) -> None:
        """After an error the server has its own model again or, if that fails too, stays paused: vLLM dies of the first
        request that meets half-loaded weights."""
        await server.post(PAUSE, None)
        try:
            await self._read_weights(server, str(folder), weights)
        except EngineError:
            (base,) = await self._base_models(server)
            await self._read_weights(server, base["root"], UNNAMED_WEIGHTS)
            await server.post(RESUME, None)
            raise
        await server.post(RESUME, None)

    async def _read_weights(self, server: InferenceServer, folder: str, weights: str) -> None:
        await server.post(CALL_WORKERS, {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        # Some versions answer with an empty 200.
        answer = await server.post(RESET_CACHE, None)
        if isinstance(answer, dict) and not answer.get("success", True):
            raise InferenceServerGone(f"{server.url} did not empty its prefix cache after its weights were replaced.")
        await server.post(NAME_WEIGHTS, {"new_version": weights})

    async def _base_models(self, server: InferenceServer) -> list[Any]:
        """The base model, under the first of its names."""
        return [model for model in (await server.get("/v1/models"))["data"] if not model.get("parent")][:1]

    async def _check_generates(self, server: InferenceServer, model: str, version: str) -> None:
        try:
            await server.post(GENERATE, probe_body(model))
        except RequestRefused as error:
            raise EngineUnavailable(
                f"vLLM {version} at {server.url} does not take token ids ({error}): start it with --enable-scale-out."
            ) from error

    async def _most_top_logprobs(self, server: InferenceServer, model: str) -> int:
        for number in TOP_LOGPROBS:
            if await self._accepts(server, model, logprobs=number):
                return number
        return 1

    async def _accepts(
        self, server: InferenceServer, model: str, request: Mapping[str, Any] | None = None, **params: Any
    ) -> bool:
        """Whether the server takes a request with these fields and sampling parameters."""
        try:
            await server.post(GENERATE, {**probe_body(model, **params), **(request or {})})
        except RequestRefused:
            return False
        return True


def structured_outputs(request: SampleRequest) -> dict[str, Any]:
    """The sampling parameter for a request's constraint."""
    if request.constraint is None:
        return {}
    return {"structured_outputs": {"structural_tag": structural_tag(request.constraint)}}


def priority_of(priority: Priority, traits: ServerTraits) -> dict[str, int]:
    """Smaller numbers go first. A server that does not schedule by priority refuses the field."""
    return {"priority": int(priority)} if traits.prioritises else {}


def probe_body(model: str, **params: Any) -> dict[str, Any]:
    """A request for one token."""
    return {"model": model, "token_ids": [1, 2], "sampling_params": {"max_tokens": 1, "detokenize": False, **params}}


def read_tokens(choice: Mapping[str, Any], index: int, top: int) -> list[SampledToken]:
    """The tokens of one event. Raises EngineUnavailable if the server gave up the request."""
    finish = choice.get("finish_reason")
    ids = choice.get("token_ids") or []
    if finish is not None and finish not in FINISHES:
        raise EngineUnavailable(f"vLLM ended the request: {finish}.")
    entries = (choice.get("logprobs") or {}).get("content") or []
    tokens = []
    for place, (id, entry) in enumerate(zip(ids, entries, strict=True)):
        likeliest = [(other["token_id"], other["logprob"]) for other in entry["top_logprobs"] if other["rank"] <= top]
        likeliest.sort(key=lambda pair: -pair[1])
        ended = FINISHES[finish] if finish and place == len(ids) - 1 else None
        tokens.append(SampledToken(index, id, known(entry["logprob"]), tuple(likeliest[:top]), ended))
    return tokens


def weights_of(choice: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the weights that computed a completion."""
    return tuple(span["version"] for span in choice.get("weight_versions") or ())


def known(logprob: float) -> float:
    """A log-prob of a given token. Raises EngineUnavailable for one that vLLM could not compute."""
    if logprob <= UNKNOWN_LOGPROB:
        raise EngineUnavailable("vLLM computed no log-prob for a token.")
    return logprob


def cached_tokens(usage: Mapping[str, Any]) -> int | None:
    cached: int | None = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return cached


def unpacked(array: str) -> Numbers:
    """An array as vLLM sends it: NumPy's file format in base64."""
    numbers: Numbers = np.load(io.BytesIO(base64.b64decode(array)), allow_pickle=False).astype(np.float32)
    return numbers


def top_tokens(rows: list[Mapping[str, Mapping[str, Any]]], k: int) -> TopTokens:
    """The k likeliest tokens of each position. The given token is in the rows too, whatever its rank."""
    chosen = [sorted((row["rank"], int(id), row["logprob"]) for id, row in rows_at.items())[:k] for rows_at in rows]
    ids = np.array([[id for _, id, _ in at] for at in chosen], np.int32)
    logprobs = np.array([[logprob for _, _, logprob in at] for at in chosen], np.float32)
    return TopTokens(ids, logprobs)


class VllmSamplerFactory(RemoteSamplerFactory):
    """vLLM, started by us or running already."""

    name = "vllm"
    package = "vllm"
    memory_share = MemoryShare("vllm_args", "--gpu-memory-utilization")
    dialect = VllmDialect()

    def options(self, settings: EngineSettings) -> RemoteServers:
        return settings.section(VllmOptions).server

    def command(self, settings: EngineSettings, model: str, port: int, gpus: int = 0) -> list[str]:
        options = self.options(settings)
        engine = settings.engine
        local = settings.section(LocalOptions)
        values = {
            "model": model,
            "served-model-name": "base",
            "host": LOOPBACK,
            "port": port,
            "dtype": precision(local.dtype),
            "max-num-seqs": engine.max_sequences,
            "max-logprobs": MAX_TOP_LOGPROBS + 1,
            "scheduling-policy": "priority",
        }
        if engine.max_context_tokens is not None:
            # One more, because vLLM takes prompts of one token less than its context.
            values["max-model-len"] = engine.max_context_tokens + 1
        if gpus:
            values["tensor-parallel-size"] = gpus
        if has_cuda() and local.kv_cache_gib is not None:
            values["kv-cache-memory-bytes"] = int(local.kv_cache_gib * (1 << 30))
        elif has_cuda() and settings.learns and settings.split.shares_gpus:
            values["gpu-memory-utilization"] = SHARED_GPU
        flags = ["--enable-scale-out", "--enable-prompt-tokens-details"]
        if engine.trust_remote_code:
            flags.append("--trust-remote-code")
        if not settings.model.full_weights:
            values |= adapter_limits(settings)
            # Without the head: on a CPU, vLLM dies when it scores a prompt together with other requests and the head
            # may have an adapter.
            flags += ["--enable-lora", "--lora-target-modules", *adaptable_names(Path(model))]
        pairs = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        return [options.python, "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags, *options.arguments]

    def environment(self, settings: EngineSettings) -> Mapping[str, str]:
        cache = settings.section(LocalOptions).kv_cache_gib or CPU_CACHE_GIB
        # The endpoints that replace weights belong to vLLM's development mode. The server listens on loopback only.
        allows = "VLLM_SERVER_DEV_MODE" if settings.model.full_weights else "VLLM_ALLOW_RUNTIME_LORA_UPDATING"
        return {allows: "1", "VLLM_CPU_KVCACHE_SPACE": str(max(1, round(cache)))}


def adapter_limits(settings: EngineSettings) -> dict[str, int]:
    """The arguments that say how many adapters a server holds, and how large they are."""
    # On a CPU an adapter that changes nothing stands for the base model.
    adapters = settings.policies_held + (0 if has_cuda() else 1)
    rank = next((rank for rank in RANKS if rank >= settings.model.lora_rank), RANKS[-1])
    return {"max-lora-rank": rank, "max-loras": adapters, "max-cpu-loras": adapters + SPARE_ADAPTERS}


SAMPLER = VllmSamplerFactory()
