"""Starts ranks within a fraction of a second, as forks of a process that has imported PyTorch and done nothing."""

import functools
import multiprocessing
from typing import Any

from openclaw_rl.engines.local.process.launcher import Link, WorkerLink
from openclaw_rl.engines.local.process.learner import SPINS
from openclaw_rl.engines.local.process.worker_messages import LOOPBACK

SHARDED = "openclaw_rl.engines.local.training.sharded"


@functools.cache
def fast_context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["openclaw_rl.engines.local.process.rank_worker", SHARDED, "torch._dynamo"])
    return context


class FastLauncher:
    """Implements `Launcher`."""

    meeting_host = LOOPBACK

    def start(self, target: str, arguments: object, device: str) -> WorkerLink:
        return Link(target, arguments, SPINS, fast_context())
