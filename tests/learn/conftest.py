"""What the tests of learning share."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from support.learning_run import LearningRun, a_run
from support.team_run import TeamRun


@pytest_asyncio.fixture
async def run(tmp_path: Path) -> AsyncIterator[LearningRun]:
    async with a_run(tmp_path / "run") as run:
        yield run


@pytest_asyncio.fixture
async def team(tmp_path: Path) -> AsyncIterator[TeamRun]:
    run = TeamRun(tmp_path / "run")
    yield run
    await run.kill()
    run.book.close()
