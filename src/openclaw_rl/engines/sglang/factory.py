"""Makes SGLang's sampler from the options."""

from collections.abc import Mapping

from openclaw_rl.engines.factory import EngineSettings
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.remote.factory import LOOPBACK, SPARE_ADAPTERS, RemoteSamplerFactory, precision
from openclaw_rl.engines.remote.options import RemoteServers
from openclaw_rl.engines.sglang.dialect import SglangDialect
from openclaw_rl.engines.sglang.options import SglangOptions

#: The share of a GPU's memory that SGLang takes if the learner needs the same GPU.
SHARED_GPU = "0.45"


class SglangSamplerFactory(RemoteSamplerFactory):
    """SGLang, started by us or running already."""

    name = "sglang"
    package = "sglang"
    dialect = SglangDialect()

    def options(self, settings: EngineSettings) -> RemoteServers:
        return settings.own(SglangOptions).server

    def command(self, settings: EngineSettings, model: str, port: int, gpus: int = 0) -> list[str]:
        options, engine = self.options(settings), settings.engine
        values = {
            "model-path": model,
            "served-model-name": "base",
            "host": LOOPBACK,
            "port": port,
            "dtype": precision(settings.own(LocalOptions).dtype),
            "max-running-requests": engine.max_sequences,
        }
        if engine.max_context_tokens is not None:
            values["context-length"] = engine.max_context_tokens + 1
        if gpus:
            values["tp-size"] = gpus
        if settings.learns and settings.split.shares_gpus:
            values["mem-fraction-static"] = SHARED_GPU
        flags = ["--enable-priority-scheduling"]
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
