"""Servers whose weights an outside trainer replaces: which version an answer has."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from openclaw_rl.engines.base import EngineUnavailable, PolicyRef, WeightForm
from openclaw_rl.engines.remote.http import InferenceServer
from openclaw_rl.engines.remote.outside_weights import OutsideWeightsSampler, WeightNumbers
from openclaw_rl.engines.remote.replica import ReplicaTimes
from openclaw_rl.engines.remote.sampler import RemoteOptions
from openclaw_rl.engines.remote.vllm import VllmDialect
from openclaw_rl.types import SampleRequest, SamplingParams, ScoreRequest
from support.inference_servers import ServerDouble

Recorded = list[tuple[int, int, str]]


#: Health is looked at more often than in earnest.
QUICK = ReplicaTimes(health=0.05, health_answer=0.3, retry=0.02, max_pause=0.05)


@pytest.fixture
async def server() -> AsyncIterator[ServerDouble]:
    server = ServerDouble()
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def sampler(server: ServerDouble, tiny_model: Path, tmp_path: Path) -> AsyncIterator[OutsideWeightsSampler]:
    options = RemoteOptions(tiny_model, None, 16, 16, 2, 4, tmp_path, times=QUICK)
    sampler = OutsideWeightsSampler(VllmDialect(), [(InferenceServer(server.url), None)], options)
    await sampler.start()
    yield sampler
    await sampler.close()


async def version_of_answer(sampler: OutsideWeightsSampler, version: int | None = None) -> int:
    stream = sampler.sample(SampleRequest([1, 2], SamplingParams(2), version=version))
    assert [token async for batch in stream for token in batch]
    return stream.version


async def test_each_new_label_is_a_new_version_that_is_recorded_with_the_one_before(
    sampler: OutsideWeightsSampler, server: ServerDouble
) -> None:
    recorded: Recorded = []
    await sampler.begin(7, lambda *given: recorded.append(given))
    assert sampler.newest_version == 8
    assert await version_of_answer(sampler) == 8
    server.model.weights = "2"
    assert await version_of_answer(sampler) == 9
    assert await version_of_answer(sampler) == 9
    server.model.weights = "3"
    assert await sampler.look() == 10
    assert recorded == [(8, 7, "default"), (9, 8, "2"), (10, 9, "3")]


async def test_a_number_that_was_reserved_for_a_step_is_not_used_for_other_weights(
    sampler: OutsideWeightsSampler, server: ServerDouble
) -> None:
    await sampler.begin(0)
    assert sampler.reserve() == 2
    server.model.weights = "2"
    assert await version_of_answer(sampler) == 3


async def test_a_server_that_was_started_again_has_new_versions(
    sampler: OutsideWeightsSampler, server: ServerDouble
) -> None:
    await sampler.begin(0)
    before = await version_of_answer(sampler)
    await server.stop()
    async with asyncio.timeout(30):
        while sampler.stats().ready:
            await asyncio.sleep(0.005)
        await server.start()
        while not sampler.stats().ready:
            await asyncio.sleep(0.005)
    assert await version_of_answer(sampler) == before + 1, "it has the same label, and perhaps other weights"


async def test_nothing_can_be_published_and_no_other_version_is_there(
    sampler: OutsideWeightsSampler, tmp_path: Path
) -> None:
    await sampler.begin(0)
    can = sampler.capabilities
    assert (can.loads, can.candidates, can.keeps_base) == (frozenset(), False, False)
    with pytest.raises(EngineUnavailable, match="outside trainer"):
        await sampler.publish(9, PolicyRef(WeightForm.PEFT, tmp_path))
    with pytest.raises(EngineUnavailable, match="not loaded"):
        await version_of_answer(sampler, version=0)
    assert await version_of_answer(sampler, version=1) == 1
    assert len((await sampler.score(ScoreRequest([1, 2, 3], 2, version=1))).logprobs) == 2


def numbers_of(labels: list[str], restarts: int = 0) -> list[int]:
    numbers = WeightNumbers()
    return [numbers.number_of(label, restarts) for label in labels]


def test_labels_that_come_and_go_while_servers_change_one_after_the_other_keep_their_numbers() -> None:
    assert numbers_of(["7", "8", "7", "8", "9"]) == [1, 2, 1, 2, 3]


def test_a_trainer_that_counts_from_the_beginning_again_has_new_versions() -> None:
    assert numbers_of(["1", "2", "3", "4", "1", "2"]) == [1, 2, 3, 4, 5, 6]
    assert numbers_of(["a", "b", "a"]) == [1, 2, 1], "labels without an order say nothing about restarts"
