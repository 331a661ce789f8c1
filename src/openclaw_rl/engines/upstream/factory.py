"""Makes the sampler of a model behind another API."""

from pathlib import Path

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import Sampler, SamplerCapabilities
from openclaw_rl.engines.factory import EngineSettings, ModelFiles, Resources, SamplerFactory
from openclaw_rl.engines.memory import EngineProcess, ModelSize
from openclaw_rl.engines.remote.options import read_urls
from openclaw_rl.engines.upstream.options import UpstreamOptions
from openclaw_rl.engines.upstream.sampler import CAPABILITIES, UpstreamSampler, UpstreamSettings
from openclaw_rl.http_client import url_without_account


class UpstreamFactory(SamplerFactory):
    """Samplers of text. They need no files of a model."""

    name = "upstream"
    model_files = ModelFiles.NOTHING
    default_model = ""

    def check(self, settings: EngineSettings) -> None:
        options = settings.section(UpstreamOptions)
        if not self.urls(settings):
            raise ConfigError("--sampler upstream needs the URL of an API: --upstream-url http://127.0.0.1:11434/v1.")
        if not options.upstream_model:
            raise ConfigError("--sampler upstream needs the model's name in the API: --upstream-model qwen3:8b.")
        if not options.upstream_key.strip().isprintable():
            raise ConfigError("UPSTREAM_API_KEY holds a character that cannot be sent, such as a line break: check it.")
        unfit = {
            "--model-name": settings.model.model_name,
            "--learner": settings.engine.learner != "auto",
            "--teacher-model-name": settings.model.teacher_model_name,
            "--custom-generate-function-path": settings.engine.custom_generate_function_path,
        }
        for option in (option for option, given in unfit.items() if given):
            raise ConfigError(
                f"{option} needs a model's weights or tokens, and with --sampler upstream they are elsewhere: "
                f"leave it out, or use another --sampler."
            )

    def capabilities(self, settings: EngineSettings) -> SamplerCapabilities:
        return CAPABILITIES

    def urls(self, settings: EngineSettings) -> list[str]:
        return read_urls("--upstream", settings.section(UpstreamOptions).upstream_url)

    def open(self, settings: EngineSettings, resources: Resources, folder: Path, name: str) -> Sampler:
        options = settings.section(UpstreamOptions)
        engine = settings.engine
        return UpstreamSampler(
            UpstreamSettings(
                urls=self.urls(settings),
                model=options.upstream_model,
                key=options.upstream_key.strip(),
                timeout=options.upstream_timeout,
                max_context=engine.max_context_tokens,
                max_sequences=engine.max_sequences,
                max_queue=engine.max_queue,
            )
        )

    def processes(self, settings: EngineSettings, size: ModelSize | None) -> list[EngineProcess]:
        return [EngineProcess(f"the API at {', '.join(map(url_without_account, self.urls(settings)))}")]


SAMPLER = UpstreamFactory()
