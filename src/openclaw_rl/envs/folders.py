"""Folders that nobody else has."""

from itertools import count
from pathlib import Path


def new_folder(wanted: Path) -> Path:
    """Make this folder; if there is one already, the first of NAME-2, NAME-3, … that does not exist."""
    for number in count(1):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError
