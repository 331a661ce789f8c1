"""The learners that the conformance suite runs over: how to start each one, and how to read its policy."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openclaw_rl.engines.base import Learner
from openclaw_rl.engines.local.process.learner import LocalLearner
from openclaw_rl.engines.local.process.worker_messages import RankOptions
from openclaw_rl.types import LossSettings
from support.fakes import ScriptedLearner
from support.rank_processes import FastLauncher
from support.tiny_models import save_tiny_gemma
from support.trainers import options
from support.training_settings import USUAL

SETTINGS = replace(USUAL, loss=LossSettings("importance_sampling"))


class LearnerHarness:
    """One learner under test, over the tiny model."""

    has_process = False
    """Whether it runs in a process that can die."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder = model, folder
        self.learner: Any = None

    async def start(self) -> None:
        self.learner = self.make()
        await self.learner.start()

    async def close(self) -> None:
        await self.learner.close()

    def make(self) -> Learner:
        raise NotImplementedError

    def set_max_kl(self, most: float) -> None:
        self.learner.settings = replace(SETTINGS, max_kl=most)

    async def state(self) -> Any:
        """Everything that the next step depends on, in a form that can be compared."""
        raise NotImplementedError

    def kill(self) -> None:
        """End the process at once, as a crash does."""
        raise NotImplementedError


class LocalLearnerHarness(LearnerHarness):
    """The local engine: a worker process."""

    has_process = True

    def make(self) -> Learner:
        # Dropout and two epochs: the source of randomness is part of the state.
        return LocalLearner(
            options(model=self.model, dropout=0.2, training=replace(SETTINGS, epochs=2)), launcher=FastLauncher()
        )

    def set_max_kl(self, most: float) -> None:
        self.learner.settings = replace(SETTINGS, epochs=2, max_kl=most)

    async def state(self) -> Any:
        folder = self.folder / "state"
        folder.mkdir(exist_ok=True)
        await self.learner.save(folder)
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    def kill(self) -> None:
        os.kill(self.learner.process.pid, signal.SIGKILL)


class TransformersLearnerHarness(LocalLearnerHarness):
    """The local engine with a model that Transformers' code computes."""

    def __init__(self, model: Path, folder: Path) -> None:
        super().__init__(save_tiny_gemma(model, folder / "gemma"), folder)


class RankedLearnerHarness(LocalLearnerHarness):
    """The local engine with two ranks. The second one is killed."""

    def make(self) -> Learner:
        given = options(model=self.model, dropout=0.2, training=replace(SETTINGS, epochs=2))
        return LocalLearner(replace(given, ranks=RankOptions(("cpu", "cpu"))), launcher=FastLauncher())

    def kill(self) -> None:
        os.kill(self.learner.process.pids[1], signal.SIGKILL)


class ShardedLearnerHarness(RankedLearnerHarness):
    """The local engine with all weights sharded over two ranks."""

    def make(self) -> Learner:
        given = options(model=self.model, rank=0, training=replace(SETTINGS, epochs=2))
        return LocalLearner(replace(given, ranks=RankOptions(("cpu", "cpu"), shards=True)), launcher=FastLauncher())


class TinkerLearnerHarness(LearnerHarness):
    """Tinker's learner, against the double of the service."""

    async def start(self) -> None:
        self.double = pytest.importorskip("support.tinker_double")
        self.patch = pytest.MonkeyPatch()
        self.cloud = self.double.Cloud(self.model, self.folder)
        self.patch.setattr(self.double.tinker, "ServiceClient", self.cloud.service)
        await super().start()
        await self.learner.primitives.sampler.start()

    async def close(self) -> None:
        await super().close()
        await self.learner.primitives.connection.close()
        self.patch.undo()

    def make(self) -> Learner:
        from openclaw_rl.engines.tinker.connection import Account, Connection
        from openclaw_rl.engines.tinker.learner import TinkerLearner
        from openclaw_rl.engines.tinker.sampler import SamplerOptions, TinkerSampler
        from openclaw_rl.engines.tinker.training_run import TrainingRunOptions

        connection = Connection(Account(None, "tml-key", timeout=60.0))
        sampler = TinkerSampler(connection, SamplerOptions("tiny/model", self.model, None, 4, 4, 8, 3))
        return TinkerLearner(connection, sampler, TrainingRunOptions(self.double.RANK, True, True, SETTINGS))

    async def state(self) -> Any:
        client = self.learner.primitives.run.client
        moments = client.optimizer.state_dict()["state"]
        weights = [parameter.tolist() for parameter in client.lora.parameters()]
        return self.learner.steps, weights, {i: {k: v.tolist() for k, v in m.items()} for i, m in moments.items()}


class ScriptedLearnerHarness(LearnerHarness):
    """The fake that other tests use in place of an engine."""

    def make(self) -> Learner:
        return ScriptedLearner()

    def set_max_kl(self, most: float) -> None:
        self.learner.max_kl = most

    async def state(self) -> Any:
        return self.learner.policy
