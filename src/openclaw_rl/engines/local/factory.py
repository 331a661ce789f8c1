"""Makes the local engine's sampler and learner from the options."""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from packaging.version import Version

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.base import Learner, LearnerCapabilities, Sampler, SamplerCapabilities, WeightForm
from openclaw_rl.engines.factory import EngineSettings, LearnerFactory, ModelFiles, Resources, SamplerFactory
from openclaw_rl.engines.gpus import environment_of
from openclaw_rl.engines.host import SHARES_MEMORY
from openclaw_rl.engines.launching import check_launcher, launcher_for
from openclaw_rl.engines.local.families import describe_family, has_own_decoder, quantisation_of, runnable
from openclaw_rl.engines.local.family_size import size_of_model
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.local.process.learner import SPINS as LEARNER_SPINS
from openclaw_rl.engines.local.process.learner import LocalLearner
from openclaw_rl.engines.local.process.sampler import SPINS as SAMPLER_SPINS
from openclaw_rl.engines.local.process.sampler import LocalSampler
from openclaw_rl.engines.local.process.worker_messages import LearnerOptions, RankOptions, WorkerOptions
from openclaw_rl.engines.memory import EngineProcess, ModelSize, learner_memory, sampler_memory
from openclaw_rl.models import EMBEDDED, can_be_fetched, find_model, longest_context, read_json_object

APPLE = (
    "--device mps is written for Apple's GPUs and has never run on one. Sampler and learner hold a copy of the "
    "weights each."
)
#: The first release of PyTorch whose FSDP2 lets us exchange weights ourselves, and goes on after a pass that failed.
SHARDING_TORCH = (2, 13)
#: Devices on which a process finds the weights that a local sampler shares.
SAMPLERS_DEVICES = ("auto", "cpu", "cuda", "cuda:0")


class LocalFactory:
    """What both factories have in common."""

    name = "local"
    model_files = ModelFiles.WEIGHTS
    has_lines = True

    def check(self, settings: EngineSettings) -> None:
        check_model(settings)
        check_launcher(settings)
        check_device(settings.section(LocalOptions))

    def notes(self, settings: EngineSettings) -> str:
        folder = find_model(settings.model.model_name, settings.cache)
        device = APPLE if settings.section(LocalOptions).device == "mps" else ""
        return " ".join(filter(None, (describe_family(folder) if folder else "", device)))


class LocalSamplerFactory(LocalFactory, SamplerFactory):
    """Samplers in a worker on this machine or on a Ray cluster."""

    default_model = EMBEDDED

    def capabilities(self, settings: EngineSettings) -> SamplerCapabilities:
        return SamplerCapabilities(loads=forms_of(settings), constrains=True)

    def open(self, settings: EngineSettings, resources: Resources, folder: Path, name: str) -> Sampler:
        local = settings.section(LocalOptions)
        engine = settings.engine
        options = WorkerOptions(
            model=usable(settings, folder),
            device=local.device,
            dtype=local.dtype,
            max_sequences=engine.max_sequences,
            max_context=engine.max_context_tokens,
            cache_gib=local.kv_cache_gib or settings.max_cache_gib,
            policy_slots=settings.policies_held,
            lora_rank=settings.model.lora_rank,
            cuda_device="" if local.on_ray else cuda_names(settings.split.local_sampler),
            pack_weights=local.pack_weights,
            quantize=local.quantize,
            trusts_code=engine.trust_remote_code,
            measurements=settings.cache,
        )
        return LocalSampler(options, engine.max_queue, launcher_for(settings, resources, "sampler", SAMPLER_SPINS))

    def why_no_gpus(self, settings: EngineSettings) -> str:
        count = len(settings.split.sampling)
        if count <= 1:
            return ""
        return f"these are {count} GPUs, and a local sampler uses one: give it one, or use --sampler vllm or sglang"

    def processes(self, settings: EngineSettings, size: ModelSize | None) -> list[EngineProcess]:
        memory = None
        if size is not None:
            # Without the option, it takes a context that fits.
            context = settings.engine.max_context_tokens or 0
            memory = sampler_memory(size, settings.trained(settings.policies_held), gpus=1, context=context)
        return [EngineProcess("local sampler", settings.split.local_sampler, memory)]

    def precision(self, settings: EngineSettings) -> str:
        local = settings.section(LocalOptions)
        if local.dtype != "auto":
            return f"{local.dtype} (--dtype)"
        if local.on_ray:
            return "bfloat16 on a GPU; on a CPU what the sampler measures"
        from openclaw_rl.engines.local.model.cpu_precision import choose_on_cpu
        from openclaw_rl.engines.local.model.placement import ON_GPU, find_device

        if dtype := ON_GPU.get(find_device(local.device).type):
            return f"{dtype} on a GPU"
        folder = find_model(settings.model.model_name, settings.cache)
        if folder and not has_own_decoder(read_json_object(folder / "config.json")):
            return "float32"
        choice = choose_on_cpu(settings.cache, keep=False)
        return f"{choice.dtype}: {choice.reason}"


class LocalLearnerFactory(LocalFactory, LearnerFactory):
    """Learners in one or several workers on this machine or on a Ray cluster."""

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        local = settings.section(LocalOptions)
        gpus = len(settings.split.learner)
        ranks = len(local.rank_devices(gpus))
        if gpus and (local.names_gpus or gpus != ranks):
            raise ConfigError(
                f"--train-gpus: these are {gpus} GPUs, and --learner-ranks {local.learner_ranks} does not use these: "
                "leave out one of the two options."
            )
        if local.quantize != "none" and settings.engine.sampler not in ("auto", "local"):
            raise ConfigError(
                f"--quantize needs --sampler local, which shares its weights with the learner; "
                f"{settings.engine.sampler} would sample from others than those that are trained."
            )
        if settings.model.lora_experts:
            check_experts(settings, find_model(settings.model.model_name, settings.cache))
        if local.shard_weights and ranks == 1:
            raise ConfigError("--shard-weights needs several --learner-ranks or --train-gpus to shard over.")
        if local.shard_weights and Version(installed := metadata.version("torch")).release < SHARDING_TORCH:
            raise ConfigError(
                f"--shard-weights needs PyTorch {'.'.join(map(str, SHARDING_TORCH))} or newer, and {installed} is "
                "installed. A learner without it needs a GPU that holds the whole model."
            )

    def capabilities(self, settings: EngineSettings) -> LearnerCapabilities:
        return LearnerCapabilities(writes=forms_of(settings))

    def open(self, settings: EngineSettings, resources: Resources, folder: Path, sampler: Sampler) -> Learner:
        """A local sampler shares its copy of the base weights with the learner, and decides on its precision.

        Servers of other projects compute in float32 on a CPU.
        """
        local = settings.section(LocalOptions)
        model = settings.model
        devices = local.rank_devices(len(settings.split.learner))
        gpus = settings.split.local_learner(samples_here=isinstance(sampler, LocalSampler))
        # The weights that a local sampler shares are on its own device, which must be that of the first rank.
        shares = settings.split.learner[:1] in ((), settings.split.local_sampler)
        options = LearnerOptions(
            model=usable(settings, folder),
            device=devices[0],
            dtype=local.dtype,
            rank=model.lora_rank,
            alpha=model.lora_alpha or 2.0 * model.lora_rank,
            dropout=model.lora_dropout,
            modules=model.adapted_modules,
            experts=model.lora_experts,
            training=settings.training,
            micro_batch_tokens=local.micro_batch_tokens,
            offload=local.offload_optimizer_state,
            base_model=model.model_name or EMBEDDED,
            cpu_dtype=sampler.cpu_dtype if isinstance(sampler, LocalSampler) else "float32",
            quantize=local.quantize,
            trusts_code=settings.engine.trust_remote_code,
            custom_loss=settings.custom_loss,
            cuda_device="" if local.names_gpus or local.on_ray else cuda_names(gpus),
            ranks=RankOptions(devices, local.shard_weights) if len(devices) > 1 else None,
        )
        launcher = launcher_for(settings, resources, "learner", LEARNER_SPINS, workers=len(devices))
        if isinstance(sampler, LocalSampler) and shares and (len(devices) > 1 or devices[0] in SAMPLERS_DEVICES):
            return LocalLearner(options, sampler.shared_weights, launcher)
        return LocalLearner(options, launcher=launcher)

    def why_no_gpus(self, settings: EngineSettings) -> str:
        return ""

    def processes(
        self, settings: EngineSettings, sampler: SamplerFactory, size: ModelSize | None
    ) -> list[EngineProcess]:
        local = settings.section(LocalOptions)
        split = settings.split
        samples_here = isinstance(sampler, LocalSamplerFactory)
        devices = split.local_learner(samples_here=samples_here)
        ranks = len(local.rank_devices(len(split.learner)))
        processes = []
        for rank in range(ranks):
            device = devices[rank : rank + 1]
            # A local sampler and the learner on the same GPU use one copy of the base weights.
            has_one_copy = SHARES_MEMORY and local.device != "mps" and not local.on_ray
            shares = samples_here and has_one_copy and device == split.local_sampler
            memory = None
            if size is not None:
                trained = settings.trained(settings.policies_held)
                memory = learner_memory(size, trained, ranks=ranks, sharded=local.shard_weights, has_weights=not shares)
            processes.append(EngineProcess(f"learner rank {rank}" if ranks > 1 else "local learner", device, memory))
        return processes

    def precision(self, settings: EngineSettings) -> str:
        """For a policy that another engine samples from."""
        local = settings.section(LocalOptions)
        if local.dtype != "auto":
            return f"{local.dtype} (--dtype)"
        if local.device == "mps":
            return "float32 on a GPU"
        return "bfloat16 on a GPU; on a CPU " + ("what the sampler measures" if local.on_ray else "float32")


def cuda_names(devices: Sequence[int]) -> str:
    """The devices as CUDA_VISIBLE_DEVICES names them; empty for all."""
    return environment_of(devices).get("CUDA_VISIBLE_DEVICES", "")


def forms_of(settings: EngineSettings) -> frozenset[WeightForm]:
    """The form in which policies are written and loaded on this machine."""
    return frozenset([WeightForm.MODEL if settings.model.full_weights else WeightForm.PEFT])


def check_model(settings: EngineSettings) -> None:
    """Check that the model is available, and that its context is long enough. Raises UserError."""
    name = settings.model.model_name
    folder = find_model(name, settings.cache)
    longest = longest_context(usable(settings, folder)) if folder else None
    if folder is None and not can_be_fetched(name):
        raise ConfigError(f"There is no folder or GGUF file {name}. --model-name also takes a Hub id.")
    asked = settings.engine.max_context_tokens
    if asked is not None and longest is not None and asked > longest:
        raise ConfigError(f"--max-context-tokens {asked} is more than the model's {longest}.")


def usable(settings: EngineSettings, folder: Path) -> Path:
    """The folder, if its model can be run with these options. Raises UserError."""
    config = read_json_object(runnable(folder, trusts_code=settings.engine.trust_remote_code) / "config.json")
    local = settings.section(LocalOptions)
    option = "--lora-rank 0" if settings.model.full_weights else "--shard-weights" if local.shard_weights else ""
    if option and not has_own_decoder(config):
        raise ConfigError(f"{option} needs a model of our own decoder, and {folder} is computed by Transformers.")
    if option and (local.quantize != "none" or quantisation_of(config)):
        raise ConfigError(f"{option} needs weights that are not quantised: use the original model, without --quantize.")
    return folder


def check_experts(settings: EngineSettings, folder: Path | None) -> None:
    """Raise ConfigError unless adapters on experts can be sampled from, and the model has experts."""
    sampler = settings.engine.sampler
    if sampler not in ("auto", "local"):
        raise ConfigError(f"--lora-experts needs --sampler local; {sampler} is not given adapters on experts.")
    size = size_of_model(read_json_object(folder / "config.json")) if folder else None
    if size is not None and not size.experts:
        raise ConfigError(f"--lora-experts needs a model with experts that PEFT can adapt, and {folder} has none.")


def check_device(local: LocalOptions) -> None:
    """Raise ConfigError for a device that this machine does not have."""
    if local.device == "mps" and (local.on_ray or len(local.rank_devices()) > 1 or local.names_gpus):
        raise ConfigError("--device mps is one GPU of this machine: leave out --launcher ray and --learner-ranks.")
    if local.device not in ("cuda", "mps") or local.on_ray:
        return
    import torch

    if local.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a CUDA device, and PyTorch finds none; use --device auto.")
    if local.device == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("--device mps needs an Apple GPU, and PyTorch finds none; use --device auto.")


SAMPLER = LocalSamplerFactory()
LEARNER = LocalLearnerFactory()
