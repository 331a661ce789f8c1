"""What the tests of judging share."""

from collections.abc import Iterator

import pytest

from support.judge_server import JudgeServer, opinion


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    server = JudgeServer(opinion())
    yield server
    server.stop()
