"""SGLang: its requests and answers, and how its servers are started."""

from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openclaw_rl.engines.base import EngineUnavailable
from openclaw_rl.engines.factory import EngineSettings, MemoryShare
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.remote.constrained import structural_tag
from openclaw_rl.engines.remote.dialect import SampledPiece, ServerScores, ServerTraits, salt_of, seed_of
from openclaw_rl.engines.remote.factory import LOOPBACK, SPARE_ADAPTERS, RemoteSamplerFactory, precision
from openclaw_rl.engines.remote.http import InferenceServer
from openclaw_rl.engines.remote.options import RemoteServers, SglangOptions
from openclaw_rl.types import FinishReason, Priority, SampledToken, SampleRequest, ScoreRequest, Scores, TopTokens

GENERATE = "/generate"
FINISHES = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
#: A log-prob as SGLang writes it: [log-prob, id, text].
Entry = Sequence[Any]
#: The share of a GPU's memory that SGLang takes if the learner needs the same GPU.
SHARED_GPU = "0.45"


class SglangDialect:
    """Implements `Dialect` for SGLang's own endpoint.

    * Log-probs are raw only if the server has SGLANG_RETURN_ORIGINAL_LOGPROB=1; the start finds out.
    * A stream may repeat all tokens in each event or send only the new ones: the number of tokens so far tells.
    * Seeds take effect only if the server has --enable-deterministic-inference.
    * The server serves larger numbers of `priority` first.
    """

    name = "sglang"
    health = "/health"
    needs = "--enable-lora --lora-target-modules all, and --max-lora-rank of at least --lora-rank"
    reload_needs = "no --enable-lora"
    raw_logprobs_need = "SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment"

    async def probe(self, server: InferenceServer) -> ServerTraits:
        info = await server.get("/server_info")
        model = await server.get("/model_info")
        context = info.get("max_context_length") or info.get("context_length")
        if not context:
            raise EngineUnavailable(
                f"{server.url} does not say how long its context is; start it with --context-length."
            )
        return ServerTraits(
            product=f"SGLang {info.get('version', '')}".rstrip(),
            base_model=model.get("served_model_name") or model["model_path"],
            # Scoring needs one more token than it is given.
            max_context=int(context) - 1,
            max_top_logprobs=None,
            scores_targets=False,
            prioritises=bool(info.get("enable_priority_scheduling")),
        )

    async def sample(
        self, server: InferenceServer, traits: ServerTraits, model: str, request: SampleRequest, index: int
    ) -> AsyncIterator[SampledPiece]:
        params = request.params
        body = {
            **self._common(traits, model, request.priority, request.owner),
            "input_ids": list(request.prompt_ids),
            "stream": True,
            "top_logprobs_num": params.top_logprobs,
            "sampling_params": {
                "max_new_tokens": params.max_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k or -1,
                "sampling_seed": seed_of(params.seed, index),
                "stop_token_ids": sorted(params.stop_token_ids),
                "ignore_eos": True,
                "no_stop_trim": True,
                **({} if request.constraint is None else {"structural_tag": structural_tag(request.constraint)}),
            },
        }
        seen = 0
        async for event in server.stream(GENERATE, body):
            info = event["meta_info"]
            new = info["completion_tokens"] - seen
            seen = info["completion_tokens"]
            yield SampledPiece(
                read_tokens(event, index, new, params.top_logprobs),
                info.get("cached_tokens"),
                weights_of(info),
            )

    async def score(
        self, server: InferenceServer, traits: ServerTraits, model: str, request: ScoreRequest
    ) -> ServerScores:
        body = {
            **self._common(traits, model, request.priority, request.owner),
            "input_ids": list(request.ids),
            # The first token from here has no log-prob, so one more is asked for.
            "logprob_start_len": len(request.ids) - request.last_n - 1,
            "top_logprobs_num": request.top_k,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0.0},
        }
        info = (await server.post(GENERATE, body))["meta_info"]
        given = [float(entry[0]) for entry in info["input_token_logprobs"][-request.last_n :]]
        if not request.top_k:
            return ServerScores(Scores(given), weights_of(info))
        rows = [ordered(row)[: request.top_k] for row in info["input_top_logprobs"][-request.last_n :]]
        ids = np.array([[id for id, _ in row] for row in rows], np.int32)
        logprobs = np.array([[logprob for _, logprob in row] for row in rows], np.float32)
        return ServerScores(Scores(given, TopTokens(ids, logprobs)), weights_of(info))

    async def load(self, server: InferenceServer, model: str, folder: Path) -> None:
        await server.post("/load_lora_adapter", {"lora_name": model, "lora_path": str(folder)})

    async def unload(self, server: InferenceServer, model: str) -> None:
        await server.post("/unload_lora_adapter", {"lora_name": model})

    async def reload(self, server: InferenceServer, weights: str, folder: Path) -> None:
        """The server itself lets requests that run finish and holds those that come."""
        await server.post(
            "/update_weights_from_disk", {"model_path": str(folder), "weight_version": weights, "flush_cache": True}
        )

    def _common(self, traits: ServerTraits, model: str, priority: Priority, owner: str) -> dict[str, Any]:
        adapter = None if model == traits.base_model else model
        return {
            "return_logprob": True,
            "lora_path": adapter,
            **({"priority": -int(priority)} if traits.prioritises else {}),
            **salt_of(owner),
        }


def read_tokens(event: Mapping[str, Any], index: int, new: int, top: int) -> list[SampledToken]:
    """The last `new` tokens of an event. Raises EngineUnavailable if the server gave up the request."""
    info = event["meta_info"]
    finish = (info.get("finish_reason") or {}).get("type")
    if finish is not None and finish not in FINISHES:
        message = info["finish_reason"].get("message") or finish
        raise EngineUnavailable(f"SGLang ended the request: {message}.")
    if not new:
        return []
    ids = event["output_ids"][-new:]
    logprobs = info["output_token_logprobs"][-new:]
    tops = info["output_top_logprobs"][-new:] if top else [()] * new
    tokens = []
    for place, (id, entry, likeliest) in enumerate(zip(ids, logprobs, tops, strict=True)):
        ended = FINISHES[finish] if finish and place == new - 1 else None
        tokens.append(SampledToken(index, id, float(entry[0]), tuple(ordered(likeliest)[:top]), ended))
    return tokens


def weights_of(info: Mapping[str, Any]) -> tuple[str, ...]:
    """The name of the weights that computed an answer, if the server says it."""
    return (info["weight_version"],) if info.get("weight_version") else ()


def ordered(entries: Sequence[Entry]) -> list[tuple[int, float]]:
    """Ids with their log-probs, the likeliest first."""
    return sorted(((int(entry[1]), float(entry[0])) for entry in entries), key=lambda pair: -pair[1])


class SglangSamplerFactory(RemoteSamplerFactory):
    """SGLang, started by us or running already."""

    name = "sglang"
    package = "sglang"
    memory_share = MemoryShare("sglang_args", "--mem-fraction-static")
    dialect = SglangDialect()

    def options(self, settings: EngineSettings) -> RemoteServers:
        return settings.section(SglangOptions).server

    def command(self, settings: EngineSettings, model: str, port: int, gpus: int = 0) -> list[str]:
        options = self.options(settings)
        engine = settings.engine
        values = {
            "model-path": model,
            "served-model-name": "base",
            "host": LOOPBACK,
            "port": port,
            "dtype": precision(settings.section(LocalOptions).dtype),
            "max-running-requests": engine.max_sequences,
        }
        if engine.max_context_tokens is not None:
            values["context-length"] = engine.max_context_tokens + 1
        if gpus:
            values["tp-size"] = gpus
        if settings.learns and settings.split.shares_gpus:
            values["mem-fraction-static"] = SHARED_GPU
        flags = ["--enable-priority-scheduling"]
        if engine.trust_remote_code:
            flags.append("--trust-remote-code")
        if not settings.model.full_weights:
            held = settings.policies_held
            values |= {
                "max-lora-rank": settings.model.lora_rank,
                "lora-target-modules": "all",
                "max-loras-per-batch": held + 1,
                "max-loaded-loras": held + SPARE_ADAPTERS,
            }
            flags.append("--enable-lora")
        pairs = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        return [options.python, "-m", "sglang.launch_server", *pairs, *flags, *options.arguments]

    def environment(self, settings: EngineSettings) -> Mapping[str, str]:
        return {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}


SAMPLER = SglangSamplerFactory()
