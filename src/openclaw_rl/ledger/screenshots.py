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
    """Delete the screenshots of sessions, except those that a kept session has too.

    Returns the folders that could not be deleted, and those that may be a kept session's: "talk-2" is the first folder
    of a session "talk-2", or the second one of "talk".
    """
    names, others = set(map(folder_name, deleted)), set(map(folder_name, kept))
    remains = []
    for path in (run_dir / FOLDER).glob("*"):
        unnumbered = _NUMBER.sub("", path.name)
        if path.name in others or not {path.name, unnumbered} & names:
            continue
        if unnumbered in others - names:
            remains.append(path)
            continue
        try:
            shutil.rmtree(path)
        except OSError:
            remains.append(path)
    return remains
