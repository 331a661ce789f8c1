"""Makes the samplers whose tokens come from servers of another project."""

import shutil
import socket
import subprocess
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import Sampler, SamplerCapabilities, WeightForm
from openclaw_rl.engines.factory import EngineSettings, ModelFiles, Resources, SamplerFactory
from openclaw_rl.engines.gpus import environment_of, has_cuda
from openclaw_rl.engines.launching import check_launcher, launcher_for
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.memory import EngineProcess, ModelSize, sampler_memory
from openclaw_rl.engines.remote.dialect import Dialect
from openclaw_rl.engines.remote.full_weights import FullWeightSampler
from openclaw_rl.engines.remote.http import InferenceServer
from openclaw_rl.engines.remote.options import RemoteServers, read_urls
from openclaw_rl.engines.remote.outside_weights import OutsideWeightsSampler
from openclaw_rl.engines.remote.process import PlacedServerProcess, ServerProcess
from openclaw_rl.engines.remote.sampler import RemoteOptions, RemoteSampler
from openclaw_rl.models import EMBEDDED

#: Likeliest tokens that a server of our own gives.
MAX_TOP_LOGPROBS = 64
#: Adapters that a server holds in addition to the policy versions: one that the start tries, and one that is being
#: unloaded.
SPARE_ADAPTERS = 2
LOOPBACK = "127.0.0.1"
IMPORT_SECONDS = 120


class RemoteSamplerFactory(SamplerFactory):
    """Samplers of one kind of server. Subclasses say how to start one."""

    name: str
    package: str
    """The Python package of the server."""
    dialect: Dialect
    model_files = ModelFiles.WEIGHTS
    default_model = EMBEDDED
    takes_urls = True
    has_lines = True

    @abstractmethod
    def options(self, settings: EngineSettings) -> RemoteServers:
        """The options of the engine, read. Raises ConfigError."""

    @abstractmethod
    def command(self, settings: EngineSettings, model: str, port: int, gpus: int = 0) -> list[str]:
        """The command that starts a server of our own, which splits its model over so many GPUs; 0: as it likes."""

    @abstractmethod
    def environment(self, settings: EngineSettings) -> Mapping[str, str]:
        """The variables that a server of our own gets in addition to ours."""

    def check(self, settings: EngineSettings) -> None:
        options = self.options(settings)
        check_launcher(settings)
        read_urls("--teacher", settings.engine.teacher_url)
        if options.urls:
            self._check_teacher(settings)
            return
        if shutil.which(options.python) is None:
            raise ConfigError(f"--{self.name}-python {options.python} is not a program.")
        look = [
            options.python,
            "-c",
            f"import importlib.util as u, sys; sys.exit(u.find_spec('{self.package}') is None)",
        ]
        if subprocess.run(look, timeout=IMPORT_SECONDS, check=False).returncode:
            raise ConfigError(
                f"{options.python} has no {self.package}: give the interpreter that has it with --{self.name}-python, "
                f"or a running server with --{self.name}-url."
            )

    def _check_teacher(self, settings: EngineSettings) -> None:
        teacher = settings.model.teacher_model_name
        if teacher not in (None, settings.model.model_name) and not settings.engine.teacher_url:
            raise ConfigError(
                f"--{self.name}-url names servers of the policy's model, so {teacher} would have no server: leave out "
                f"--teacher-model-name or --{self.name}-url, give its servers with --teacher-url, or a judge with "
                "--judge-base-url."
            )

    def capabilities(self, settings: EngineSettings) -> SamplerCapabilities:
        """What a server may be able to do; the sampler knows once its server runs."""
        if settings.trains_outside:
            return SamplerCapabilities(loads=frozenset(), candidates=False, keeps_base=False, constrains=True)
        if settings.model.full_weights:
            return SamplerCapabilities(
                loads=frozenset([WeightForm.MODEL]), candidates=False, keeps_base=False, constrains=True
            )
        return SamplerCapabilities(loads=frozenset([WeightForm.PEFT]), constrains=True)

    def open(self, settings: EngineSettings, resources: Resources, folder: Path, name: str) -> Sampler:
        options = self.options(settings)
        engine = settings.engine
        urls = read_urls("--teacher", settings.other_urls) or options.urls
        servers: list[tuple[InferenceServer, ServerProcess | None]] = [
            (InferenceServer(url, options.key), None) for url in urls
        ]
        for devices in () if servers else gpus_of_servers(settings):
            port = free_port()
            command = self.command(settings, str(folder), port, len(devices))
            process = self._process(settings, resources, command, devices)
            servers.append((InferenceServer(f"http://{LOOPBACK}:{port}"), process))
        return self._sampler_type(settings)(
            self.dialect,
            servers,
            RemoteOptions(
                model=folder,
                max_context=engine.max_context_tokens,
                max_sequences=engine.max_sequences,
                max_queue=engine.max_queue,
                policies=settings.policies_held,
                lora_rank=settings.model.lora_rank,
                policies_folder=settings.policies_folder,
                learns=settings.learns,
            ),
        )

    def _process(
        self, settings: EngineSettings, resources: Resources, command: Sequence[str], devices: Sequence[int]
    ) -> ServerProcess:
        if not settings.section(LocalOptions).on_ray:
            return ServerProcess(self.name, command, self._variables(settings, devices))
        role = f"{self.name} server"
        launcher = launcher_for(settings, resources, role, 0, gpus=len(devices) or None, on_this_node=True)
        return PlacedServerProcess(self.name, command, self.environment(settings), launcher)

    def _sampler_type(self, settings: EngineSettings) -> type[RemoteSampler]:
        if settings.trains_outside:
            return OutsideWeightsSampler
        return FullWeightSampler if settings.model.full_weights else RemoteSampler

    def start_commands(self, settings: EngineSettings) -> list[list[str]]:
        if self.options(settings).urls:
            return []
        model = settings.model.model_name or self.default_model
        return [
            [
                "env",
                *(f"{name}={value}" for name, value in self._variables(settings, devices).items()),
                *self.command(settings, model, free_port(), len(devices)),
            ]
            for devices in gpus_of_servers(settings)
        ]

    def urls(self, settings: EngineSettings) -> list[str]:
        return self.options(settings).urls

    def why_no_gpus(self, settings: EngineSettings) -> str:
        return f"--{self.name}-url names servers that run already" if self.urls(settings) else ""

    def processes(self, settings: EngineSettings, size: ModelSize | None) -> list[EngineProcess]:
        if urls := settings.other_urls or ",".join(self.urls(settings)):
            return [EngineProcess(f"{self.name} at {urls}")]
        servers = gpus_of_servers(settings)
        processes = []
        for number, devices in enumerate(servers, start=1):
            memory = None
            if size is not None:
                # If all weights are trained, a server holds one version.
                policies = 0 if settings.model.full_weights else settings.policies_held
                context = settings.engine.max_context_tokens or size.max_context
                trained = settings.trained(policies)
                memory = sampler_memory(size, trained, gpus=max(1, len(devices)), context=context)
            name = f"{self.name} server {number}" if len(servers) > 1 else f"{self.name} server"
            processes.append(EngineProcess(name, tuple(devices), memory))
        return processes

    def _variables(self, settings: EngineSettings, devices: Sequence[int]) -> dict[str, str]:
        return {**self.environment(settings), **environment_of(devices)}


def gpus_of_servers(settings: EngineSettings) -> Sequence[Sequence[int]]:
    """The GPUs of each server of our own; without a choice there is one server, which sees all GPUs."""
    return settings.split.policy or [()]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        port: int = listener.getsockname()[1]
        return port


def precision(dtype: str) -> str:
    """The precision that --dtype stands for, so that server and learner compute in the same one."""
    if dtype != "auto":
        return dtype
    return "bfloat16" if has_cuda() else "float32"
