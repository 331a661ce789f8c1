"""What the tests of learning share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from openclaw_rl.learn import loop as module
from support.learning_run import LearningRun, a_run


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(module, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(module, "IDLE_SECONDS", 0.05)


@pytest_asyncio.fixture
async def run(tmp_path: Path) -> AsyncIterator[LearningRun]:
    async with a_run(tmp_path / "run") as run:
        yield run
