"""Bounds in messages are written as people write them."""

from typing import Any

import pytest
from pydantic import BaseModel, Field, ValidationError

from openclaw_rl.config.options import describe_problem


class Bounded(BaseModel):
    reward: float = Field(0.0, le=1e6)
    count: int = Field(0, le=1_048_576)
    share: float = Field(0.0, ge=0.25)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"reward": 2e6}, "it must be at most 1000000"),
        ({"count": 1_048_577}, "it must be at most 1048576"),
        ({"share": 0.1}, "it must be at least 0.25"),
    ],
)
def test_a_bound_is_written_in_full(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Bounded(**given)
    assert describe_problem(caught.value.errors()[0]) == problem
