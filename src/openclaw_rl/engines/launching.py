"""Which launcher starts the workers of an engine, as --launcher says."""

import importlib.util

from openclaw_rl.config.options import ConfigError
from openclaw_rl.engines.factory import EngineSettings, Resources
from openclaw_rl.engines.local.options import LocalOptions
from openclaw_rl.engines.local.process.launcher import Launcher, ProcessLauncher


def check_launcher(settings: EngineSettings) -> None:
    """Refuse --launcher ray where Ray is missing, and devices that Ray would have to choose. Raises ConfigError."""
    local = settings.section(LocalOptions)
    if not local.on_ray:
        return
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("--launcher ray needs Ray: pip install 'openclaw-rl[ray]'.")
    if local.names_gpus:
        raise ConfigError(f"--learner-ranks {local.learner_ranks}: Ray chooses the GPUs, so give a count.")


def launcher_for(
    settings: EngineSettings,
    resources: Resources,
    role: str,
    spins: int,
    *,
    workers: int = 1,
    gpus: int | None = None,
    on_this_node: bool = False,
) -> Launcher:
    """Starts the workers of one role: `workers` at a time, each with so many GPUs.

    `gpus` and `on_this_node` are for Ray only. Without `gpus`, --device says whether a worker gets one.
    """
    local = settings.section(LocalOptions)
    if not local.on_ray:
        return ProcessLauncher(spins)
    from openclaw_rl.engines.ray.launcher import Needs, RayCluster, RayLauncher, Room

    if gpus is None:
        gpus = {"cpu": 0, "cuda": 1}.get(local.device)
    cluster = resources.shared(RayCluster, lambda: RayCluster(local.ray_address))
    needs = Needs(role, workers, local.ray_cpus, gpus, on_this_node)
    return RayLauncher(Room(cluster, needs), spins)
