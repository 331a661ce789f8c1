"""Where a run keeps screenshots of episodes: a folder for each attempt, named after its session."""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path

#: In the run directory.
FOLDER = "screenshots"
#: How much of a session's or a task's name stands in the name of a folder; the driver's names are shorter.
MAX_NAME_CHARACTERS = 120
#: The number behind the name of a folder, if there was one of that name already.
_NUMBER = re.compile(r"-\d+$")


def folder_name(session: str) -> str:
    """The name of a session's first folder. It leads to no other folder, and can stand in an address as it is."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", session)[:MAX_NAME_CHARACTERS]
    return f"_{name}" if name[:1] in ("", ".", "-") else name


def delete_screenshots(
    run_dir: Path, deleted: Collection[str], kept: Collection[str], say: Callable[[str], None]
) -> list[str]:
    """Delete the screenshots of deleted sessions; the sessions that this is finished for.

    A folder that may be a kept session's stays: "talk-2" is the first folder of a session "talk-2", or the second one
    of "talk". `say` is told a sentence about each folder that stays. A session is unfinished while a folder that is
    surely its own could not be deleted.
    """
    others = {folder_name(session): session for session in kept}
    folders: dict[str, list[Path]] = {}
    for path in sorted((run_dir / FOLDER).glob("*")):
        for name in possible_names(path):
            folders.setdefault(name, []).append(path)
    return [
        session for session in deleted if delete_folders(folders.get(folder_name(session), ()), session, others, say)
    ]


def possible_names(folder: Path) -> set[str]:
    """The names of sessions whose folder this may be."""
    return {folder.name, _NUMBER.sub("", folder.name)}


def delete_folders(
    folders: Iterable[Path], session: str, others: Mapping[str, str], say: Callable[[str], None]
) -> bool:
    """Delete the folders of a session that are not also called like those of others; whether all were deleted."""
    finished = True
    for path in folders:
        if shared := possible_names(path) & others.keys():
            other = others[min(shared)]
            say(f"{path} may be of the session {other} or of {session}, which was deleted: look at it, and decide.")
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            if not os.path.lexists(path):
                continue  # another deleted session had this folder too
            say(f"{path} could not be deleted ({error.strerror or error}): delete it by hand.")
            finished = False
    return finished
