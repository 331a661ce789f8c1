"""What the tests of judging share."""

from collections.abc import Iterator

import pytest

from openclaw_rl.judge import circuit_breaker, loop
from support.judge_server import JudgeServer, opinion


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    server = JudgeServer(opinion())
    yield server
    server.stop()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses are what they are for people; tests need not wait so long."""
    monkeypatch.setattr(loop, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(circuit_breaker, "FIRST_PAUSE", 0.02)
    monkeypatch.setattr(circuit_breaker, "LONGEST_PAUSE", 0.1)
