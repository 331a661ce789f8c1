"""Where a run keeps screenshots of episodes: a folder for each attempt, named after its session."""

import re
import shutil
from collections.abc import Collection
from pathlib import Path

#: In the run directory.
FOLDER = "screenshots"
#: How much of a session's or a task's name stands in the name of a folder; the driver's names are shorter.
MAX_NAME_CHARACTERS = 120
#: The number behind the name of a folder, if there was one of that name already.
_NUMBER = re.compile(r"-\d+$")


def folder_name(session: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", session)[:MAX_NAME_CHARACTERS]


def delete_screenshots(run_dir: Path, deleted: Collection[str], kept: Collection[str]) -> list[Path]:
    """Delete the screenshots of sessions, except those that a kept session has too; what could not be deleted."""
    names, others = set(map(folder_name, deleted)), set(map(folder_name, kept))
    remains = []
    for path in (run_dir / FOLDER).glob("*"):
        if path.name not in others and (path.name in names or _NUMBER.sub("", path.name) in names):
            try:
                shutil.rmtree(path)
            except OSError:
                remains.append(path)
    return remains
