"""Screenshots of the browser environment, if they are kept in the folder `screenshots` of the run.

Each episode has a folder there that is named after its session.
"""

import re
from pathlib import Path

from openclaw_rl.ledger.screenshots import FOLDER

#: What the environment names folders and images. No name leads to another folder.
_FOLDER_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_IMAGE_NAME = re.compile(r"\d+\.png")


def latest_folders(run_dir: Path | None, most: int) -> list[str]:
    """The folders that changed last, at most so many."""
    if run_dir is None:
        return []
    folders = [path for path in (run_dir / FOLDER).glob("*") if _FOLDER_NAME.fullmatch(path.name)]
    return [path.name for path in sorted(folders, key=changed, reverse=True)[:most]]


def changed(path: Path) -> float:
    """When a folder last changed; 0 if it has just been removed."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def images(run_dir: Path | None, folder: str) -> list[str]:
    """The images in a folder, in the order they were taken; empty if there is no such folder."""
    if run_dir is None or not _FOLDER_NAME.fullmatch(folder):
        return []
    names = [path.name for path in (run_dir / FOLDER / folder).glob("*.png")]
    return sorted((name for name in names if _IMAGE_NAME.fullmatch(name)), key=lambda name: (len(name), name))


def read_image(run_dir: Path | None, folder: str, name: str) -> bytes | None:
    """An image; None if there is none of this name."""
    if run_dir is None or name not in images(run_dir, folder):
        return None
    try:
        return (run_dir / FOLDER / folder / name).read_bytes()
    except OSError:
        return None
