"""What generated tasks and data sets share: checked choices, files of tasks, and which tasks are held out."""

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from pydantic import ValidationError

from openclaw_rl.config.options import ConfigError, read_text

T = TypeVar("T")

TRAIN, HELD_OUT = "train", "held-out"
#: The splits of every built-in environment.
SPLITS = (TRAIN, HELD_OUT)
#: Of tasks that name no split, one in so many is held out.
HELD_OUT_ONE_IN = 5


def split_of(digest: int) -> str:
    """The split of a task that names none, by a digest of what identifies it: the same on every machine."""
    return HELD_OUT if digest % HELD_OUT_ONE_IN == 0 else TRAIN


def several(environment: str, name: str, given: Any, known: Collection[Any]) -> tuple[Any, ...]:
    """One or several of the known values, as given in an option. Raises ConfigError."""
    if isinstance(given, str):
        given = given.split(",")
    values = tuple(given) if isinstance(given, Sequence) else (given,)
    if wrong := [value for value in values if value not in known]:
        raise ConfigError(f"{environment} has no {name} {wrong[0]}; there are {', '.join(map(str, known))}.")
    if not values:
        raise ConfigError(f"{environment} needs at least one {name}.")
    return values


def checked_split(environment: str, split: str) -> str:
    """The split. Raises ConfigError if there is no such split."""
    if split not in SPLITS:
        raise ConfigError(f"{environment} has no split {split}; the splits are {' and '.join(SPLITS)}.")
    return split


def checked_examples(environment: str, examples: Any, most: int) -> int:
    """The number of examples. Raises ConfigError if it is none of 0 to `most`."""
    if isinstance(examples, bool) or not isinstance(examples, int) or not 0 <= examples <= most:
        raise ConfigError(f"The number of examples of {environment} is from 0 to {most}, not {examples}.")
    return examples


def digest(content: Any) -> int:
    """A number for a JSON value: equal for equal values, on every machine."""
    return text_digest(json.dumps(content, sort_keys=True))


def text_digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def split_with_examples(digest: int) -> str:
    """The split of a generated task: as `split_of`, but one in so many more is used for examples only."""
    return "examples" if digest % HELD_OUT_ONE_IN == 1 else split_of(digest)


def in_rounds(name: str, tasks: Sequence[T], seed: int) -> Iterator[T]:
    """The tasks without end; each round has all of them, in an order that the seed decides."""
    for number in count():
        yield from Random(f"{name} {seed} {number}").sample(tasks, len(tasks))


def read_json_lines(path: Path, option: str) -> list[tuple[str, Any]]:
    """The values of a file with one JSON value a line, each with the place that a message names. Raises ConfigError."""
    values = []
    # Not splitlines: JSON may have U+2028 in a text.
    for number, line in enumerate(read_text(path, option).split("\n"), 1):
        if not line.strip():
            continue
        place = f"{option}: {path}, line {number}"
        try:
            values.append((place, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place}: Invalid JSON: {error}.") from None
    return values


def first_problem(error: ValidationError) -> str:
    """The first of the problems that pydantic found, with its place."""
    problem = error.errors()[0]
    where = ".".join(map(str, problem["loc"]))
    return f"{where}{': ' if where else ''}{problem['msg'].removeprefix('Value error, ')}"
