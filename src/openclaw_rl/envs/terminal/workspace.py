"""The folder that a task is about: how it is filled, and what is in it. Nothing in it is trusted.

An entry of a task is a text (a file), or a mapping with "text", "dir", "json" or "any", and optionally "mode".
"""

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE, FOLDER, LINK, OTHER = "file", "folder", "link", "other"
#: Modes of what a task brings, unless it says otherwise.
FILE_MODE, FOLDER_MODE = 0o644, 0o755
#: A workspace with more entries or bytes is not looked at any further.
MAX_ENTRIES, MAX_BYTES = 5_000, 32 << 20
#: Entries at the top that programs leave in a home folder by themselves.
LEFT_BY_PROGRAMS = frozenset({".cache", ".config", ".local", ".gitconfig", ".bash_history", ".lesshst"})
GIT = ".git"


class WorkspaceTooLarge(Exception):
    """The policy has filled the workspace beyond what is looked at."""


@dataclass(frozen=True, slots=True)
class WorkspaceItem:
    """Something in a workspace."""

    kind: str
    mode: int
    content: bytes = b""
    """The bytes of a file, or the target of a link."""


def fill(folder: Path, entries: Mapping[str, Any]) -> None:
    """Write the entries of a task into an empty folder."""
    # Modes come last: a folder may be closed to its owner.
    modes = []
    for name, entry in entries.items():
        path = folder / name
        wanted = entry if isinstance(entry, Mapping) else {"text": entry}
        if wanted.get("dir"):
            path.mkdir(parents=True, exist_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted["text"])
        modes.append((path, wanted.get("mode", FOLDER_MODE if wanted.get("dir") else FILE_MODE)))
    for path in folder.rglob("*"):
        if path.is_dir():
            path.chmod(FOLDER_MODE)
    for path, mode in reversed(modes):
        path.chmod(mode)


def look(folder: Path) -> dict[str, WorkspaceItem]:
    """Everything in a workspace by its path, without following links. Raises WorkspaceTooLarge.

    What git keeps in `.git` is left out: it is checked with git's own commands.
    """
    items: dict[str, WorkspaceItem] = {}
    waiting = [""]
    size = 0
    while waiting:
        inside = waiting.pop()
        for name in _names(folder / inside):
            path = f"{inside}/{name}" if inside else name
            if path in LEFT_BY_PROGRAMS:
                continue
            item = _item(folder / path, MAX_BYTES - size)
            size += len(item.content)
            items[path] = item
            if len(items) > MAX_ENTRIES:
                raise WorkspaceTooLarge(f"there are more than {MAX_ENTRIES} files")
            if item.kind == FOLDER and name != GIT:
                waiting.append(path)
    return items


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:  # closed to its owner, or its path is too long
        return []


def _item(path: Path, room: int) -> WorkspaceItem:
    try:
        status = path.lstat()
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISDIR(status.st_mode):
            return WorkspaceItem(FOLDER, mode)
        if stat.S_ISLNK(status.st_mode):
            return WorkspaceItem(LINK, mode, os.readlink(path).encode("utf-8", "surrogateescape"))
        if not stat.S_ISREG(status.st_mode):
            return WorkspaceItem(OTHER, mode)
        if status.st_size > room:
            raise WorkspaceTooLarge(f"there are more than {MAX_BYTES >> 20} MiB of files")
        return WorkspaceItem(FILE, mode, read_bytes(path, room))
    except OSError:
        return WorkspaceItem(OTHER, 0)


def read_bytes(path: Path, room: int) -> bytes:
    """The first bytes of a file. Raises OSError."""
    # Without waiting and without following: the entry may have been replaced by a pipe or a link.
    opened = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(opened, "rb") as file:
        return file.read(room)
