"""Ranks as processes: they are one learner, and the death of one is the death of all."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from openclaw_rl.engines.base import EngineUnavailable, StepStopped
from openclaw_rl.engines.local.model.decoder import load_decoder
from openclaw_rl.engines.local.process.learner import LocalLearner
from openclaw_rl.engines.local.process.worker_messages import RankOptions
from openclaw_rl.types import TrainingSequence
from support.faulty_rank import FaultyLauncher
from support.rank_processes import FastLauncher
from support.trainers import InProcessLearner, batch, options

# Starting processes takes seconds, so the tests share them and leave them usable.
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.more]


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> FaultyLauncher:
    return FaultyLauncher(tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module")
def in_process(tiny_model: Path) -> InProcessLearner:
    return InProcessLearner(load_decoder(tiny_model, torch.float32, torch.device("cpu")), options())


@pytest.fixture(scope="module")
def sequences(in_process: InProcessLearner) -> list[TrainingSequence]:
    return batch(in_process, count=6)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tiny_model: Path, launcher: FaultyLauncher) -> AsyncIterator[LocalLearner]:
    ranks = RankOptions(("cpu", "cpu"), shards=True)
    learner = LocalLearner(options(model=tiny_model, ranks=ranks), launcher=launcher)
    await learner.start()
    yield learner
    await learner.close()


@pytest_asyncio.fixture(loop_scope="module")
async def learner(running: LocalLearner) -> LocalLearner:
    await running.reset()
    return running


async def saved(learner: LocalLearner, folder: Path) -> dict[str, bytes]:
    await learner.save(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_step_is_that_of_one_process(
    learner: LocalLearner, in_process: InProcessLearner, sequences: list[TrainingSequence]
) -> None:
    result = await learner.step(sequences)
    await in_process.transaction.reset()
    expected = await in_process.transaction.step(sequences)
    assert result.loss == pytest.approx(expected.loss, abs=1e-5)
    assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    assert (result.tokens, result.response_tokens) == (expected.tokens, expected.response_tokens)
    assert len(learner.process.pids) == 2
    assert learner.describe() == "local, 2 ranks on cpu, weights sharded"
    assert 0 < learner.process.weight_bytes < 0.52 * in_process.trainer.weight_bytes


@pytest.mark.parametrize(
    ("place", "number"), [("forward", 1), ("backward", 0), ("optimiser", 1), ("save", 0)], ids=lambda value: str(value)
)
async def test_when_a_rank_is_killed_all_start_again_from_the_checkpoint(
    learner: LocalLearner,
    launcher: FaultyLauncher,
    sequences: list[TrainingSequence],
    tmp_path: Path,
    place: str,
    number: int,
) -> None:
    await learner.step(sequences)
    before = await saved(learner, tmp_path / "saved")
    await learner.step(sequences[:3])
    after = await saved(learner, tmp_path / "after")
    pids = learner.process.pids
    launcher.arm(place, number)
    async with asyncio.timeout(300):
        with pytest.raises(EngineUnavailable, match=rf"Rank {number}: .*SIGKILL"):
            await (learner.save(tmp_path / "torn") if place == "save" else learner.step(sequences))
    assert all(map(is_gone, pids))
    await learner.load(tmp_path / "saved")
    assert not set(learner.process.pids) & set(pids)
    assert await saved(learner, tmp_path / "loaded") == before
    # The steps since the checkpoint are made again, with the same result to the last bit.
    await learner.step(sequences[:3])
    assert await saved(learner, tmp_path / "again") == after


async def test_a_step_that_is_stopped_leaves_everything_as_it_was(
    learner: LocalLearner, in_process: InProcessLearner, sequences: list[TrainingSequence], tmp_path: Path
) -> None:
    await learner.step(sequences)
    before, pids = await saved(learner, tmp_path / "before"), learner.process.pids
    stepping = asyncio.create_task(learner.step(batch(in_process, count=300)))
    await asyncio.sleep(0.3)
    assert not stepping.done()
    learner.stop_step()
    with pytest.raises(StepStopped):
        await stepping
    assert await saved(learner, tmp_path / "after") == before
    assert learner.process.pids == pids


async def test_a_model_that_cannot_be_loaded_is_a_sentence(tmp_path: Path) -> None:
    ranks = RankOptions(("cpu", "cpu"))
    learner = LocalLearner(replace(options(model=tmp_path / "model"), ranks=ranks), launcher=FastLauncher())
    async with asyncio.timeout(300):
        with pytest.raises(EngineUnavailable, match="could not load the model"):
            await learner.start()
    assert learner.process.pids == []
