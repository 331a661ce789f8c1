"""Makes vLLM's sampler from the options."""

from collections.abc import Mapping

from openclaw_rl.engines.factory import EngineSettings
from openclaw_rl.engines.gpus import has_cuda
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.options import LINEAR_MODULES
from openclaw_rl.engines.remote.factory import (
    LOOPBACK,
    MAX_TOP_LOGPROBS,
    SPARE_ADAPTERS,
    RemoteSamplerFactory,
    precision,
)
from openclaw_rl.engines.remote.options import RemoteServers
from openclaw_rl.engines.vllm.dialect import VllmDialect
from openclaw_rl.engines.vllm.options import VllmOptions

#: The ranks that --max-lora-rank takes.
RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
#: The share of a GPU's memory that vLLM takes if the learner needs the same GPU.
SHARED_GPU = "0.45"
#: The key-value cache on a CPU, in GiB.
CPU_CACHE_GIB = 1.0


class VllmSamplerFactory(RemoteSamplerFactory):
    """vLLM, started by us or running already."""

    name = "vllm"
    package = "vllm"
    dialect = VllmDialect()

    def options(self, settings: EngineSettings) -> RemoteServers:
        return settings.own(VllmOptions).server

    def command(self, settings: EngineSettings, model: str, port: int, gpus: int = 0) -> list[str]:
        options, engine, local = self.options(settings), settings.engine, settings.own(LocalOptions)
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
        if not settings.model.full_weights:
            values |= adapter_limits(settings)
            # Without the head: on a CPU, vLLM dies when it scores a prompt beside other requests and the head may have
            # an adapter.
            flags += ["--enable-lora", "--lora-target-modules", *LINEAR_MODULES]
        pairs = [part for name, value in values.items() for part in (f"--{name}", str(value))]
        return [options.python, "-m", "vllm.entrypoints.openai.api_server", *pairs, *flags, *options.arguments]

    def environment(self, settings: EngineSettings) -> Mapping[str, str]:
        cache = settings.own(LocalOptions).kv_cache_gib or CPU_CACHE_GIB
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
