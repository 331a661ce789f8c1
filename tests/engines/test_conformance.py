"""The conformance suite over each engine. A new engine is added to the list."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from engines.conformance import LearnerConformance, SamplerConformance
from support.engine_harness import (
    FullWeightsSglangHarness,
    FullWeightsVllmHarness,
    LocalHarness,
    SamplerHarness,
    ScriptedHarness,
    SglangHarness,
    TinkerHarness,
    TransformersHarness,
    VllmHarness,
)
from support.learner_harness import (
    LearnerHarness,
    LocalLearnerHarness,
    RankedLearnerHarness,
    ScriptedLearnerHarness,
    ShardedLearnerHarness,
    TinkerLearnerHarness,
    TransformersLearnerHarness,
)


def later(harness: type[SamplerHarness] | type[LearnerHarness]) -> Any:
    """A variant of an engine, which `make test-more` tests."""
    return pytest.param(harness, marks=pytest.mark.more)


SAMPLERS = [
    LocalHarness,
    later(TransformersHarness),
    TinkerHarness,
    later(VllmHarness),
    later(SglangHarness),
    later(FullWeightsVllmHarness),
    later(FullWeightsSglangHarness),
    ScriptedHarness,
]
LEARNERS = [
    LocalLearnerHarness,
    later(TransformersLearnerHarness),
    later(RankedLearnerHarness),
    later(ShardedLearnerHarness),
    TinkerLearnerHarness,
    ScriptedLearnerHarness,
]

# Starting a process takes seconds, so all tests of an engine share one.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=SAMPLERS, ids=lambda made: made.__name__)
async def engine(
    request: pytest.FixtureRequest, tiny_model: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[SamplerHarness]:
    harness: SamplerHarness = request.param(tiny_model, adapters, tmp_path_factory.mktemp("engine"))
    await harness.start()
    yield harness
    await harness.close()


class TestSampler(SamplerConformance):
    """Every sampler."""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=LEARNERS, ids=lambda made: made.__name__)
async def started_learner(
    request: pytest.FixtureRequest, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[LearnerHarness]:
    harness: LearnerHarness = request.param(tiny_model, tmp_path_factory.mktemp("learner"))
    await harness.start()
    yield harness
    await harness.close()


class TestLearner(LearnerConformance):
    """Every learner."""

    @pytest_asyncio.fixture(loop_scope="module")
    async def engine(self, started_learner: LearnerHarness) -> LearnerHarness:
        started_learner.set_max_kl(100.0)
        await started_learner.learner.reset()
        return started_learner
