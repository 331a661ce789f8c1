"""How busy the server was in the last minute."""

import pytest

from openclaw_rl.api.server_metrics import WINDOW_SECONDS, Activity, RecentActivity


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_last_minute_is_counted_and_older_ones_forgotten() -> None:
    clock = Clock()
    recent = RecentActivity(clock)
    assert recent.read() == Activity(0, 0.0, None)
    for seconds in (0.1, 0.2, 0.9):
        recent.add_first_token(seconds)
        recent.add_tokens(100)
        recent.add_request()
        clock.now += 10
    assert recent.read() == Activity(3, 5.0, 0.2)
    clock.now += WINDOW_SECONDS - 25
    assert recent.read().requests == 2
    clock.now += WINDOW_SECONDS
    assert recent.read() == Activity(0, 0.0, None)


@pytest.mark.parametrize("count", [1, 100_000])
def test_memory_does_not_grow_with_traffic(count: int) -> None:
    clock = Clock()
    recent = RecentActivity(clock)
    for _ in range(count):
        clock.now += 0.01
        recent.add_tokens(1)
        recent.add_first_token(0.1)
    assert len(recent._seconds) <= WINDOW_SECONDS + 1
    assert len(recent._first_tokens) <= 500
