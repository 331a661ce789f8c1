"""Episodes parse source in threads, which CPython's parser cannot bear without a lock."""

import gc
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from openclaw_rl.envs.swe.packages import literal, parse

NESTED = "[" * 20 + "1" + "]" * 20


class Garbage:
    """Only the collector frees it, and it runs Python code then: so threads switch in the middle of a parse."""

    def __init__(self) -> None:
        self.myself = self

    def __del__(self) -> None:
        sum(range(50))


@pytest.fixture
def many_switches() -> Iterator[None]:
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(10)
    yield
    sys.setswitchinterval(interval)
    gc.set_threshold(*thresholds)


@pytest.mark.usefixtures("many_switches")
def test_threads_parse_at_the_same_time() -> None:
    def read(_: int) -> None:
        Garbage()
        parse(f"x = {NESTED}\n" * 20)
        literal(NESTED)

    with ThreadPoolExecutor(6) as pool:
        assert len(list(pool.map(read, range(300)))) == 300
