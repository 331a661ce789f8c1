"""A custom judge whose answers are wrong in the way that the user's message names: `case NAME.`."""

import json
import math
import re
import sys
import time
from typing import Any


def deep() -> list[Any]:
    value: list[Any] = []
    for _ in range(100_000):
        value = [value]
    return value


def recurse() -> Any:
    return recurse()


#: What `score` returns or raises, by case.
CASES = {
    "nan": lambda: math.nan,
    "infinite": lambda: math.inf,
    "1e9": lambda: 1e9,
    "huge integer": lambda: 10**400,
    "text": lambda: "good",
    "true": lambda: True,
    "list": lambda: [1.0],
    "deep": deep,
    "recursion": recurse,
    "garbage": lambda: json.loads("[" * 200_000),
    "exit": lambda: sys.exit(3),
    "hang": lambda: time.sleep(5),
}


def score(_prompt: Any, _response: Any, next_state: Any) -> Any:
    """The case's answer; 1 for anything else."""
    named = re.search(r"case ([\w ]+)\.", str(next_state))
    return CASES[named[1]]() if named else 1.0
