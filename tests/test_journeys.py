"""How many files one has to open to follow a request, a verdict and an episode through the running program."""

from collections.abc import Callable
from pathlib import Path

import pytest

from support.journeys import Journey, episode, follow_up, thanks


@pytest.mark.more
@pytest.mark.parametrize(("take", "most"), [(follow_up, 30), (thanks, 45), (episode, 14)])
def test_a_journey_enters_few_files(take: Callable[[Journey], list[str]], most: int, tmp_path: Path) -> None:
    files = take(Journey(tmp_path))
    assert len(files) <= most, "\n".join(files)
