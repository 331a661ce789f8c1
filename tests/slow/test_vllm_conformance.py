"""The conformance suite over a real vLLM server on a CPU. Run by `make test-vllm`."""

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from engines.conformance import SamplerConformance
from support.engine_harness import SamplerHarness
from support.real_vllm import HEAD_SIZE, VLLM, RealVllmHarness
from support.tiny_models import save_adapters, save_tiny_model

pytestmark = [
    pytest.mark.skipif(not VLLM, reason="OPENCLAW_RL_VLLM names no Python with vLLM"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SamplerHarness]:
    model = save_tiny_model(tmp_path_factory.mktemp("model"), head_size=HEAD_SIZE)
    adapters = save_adapters(model, tmp_path_factory.mktemp("adapters"))
    harness = RealVllmHarness(model, adapters, tmp_path_factory.mktemp("engine"))
    await harness.start()
    yield harness
    await harness.close()


class TestRealVllm(SamplerConformance):
    """vLLM itself."""
