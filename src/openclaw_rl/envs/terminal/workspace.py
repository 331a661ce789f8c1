"""The folder that a task is about: how it is filled, what is in it, and how it is scored. Nothing in it is trusted.

An entry of a task is a text (a file), or a mapping with "text", "dir", "json" or "any", and optionally "mode".

- A goal is something that a task changes: an entry that has to be there, one that has to be gone, or a check.
- Everything else that was so at the start has to stay: entries with their modes, and checks. Nothing else may be there.

    progress = share of the goals that are met
    kept     = what stayed / (what has to stay + entries that do not belong there)
    reward   = 1 if all goals are met and kept is 1, else 0.1 · ran + 0.7 · progress · kept

`ran` is 1 if a command ended with status 0.
"""

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from openclaw_rl.lab.schema import same_json

FILE = "file"
FOLDER = "folder"
LINK = "link"
OTHER = "other"
#: Modes of what a task brings, unless it says otherwise.
FILE_MODE = 0o644
FOLDER_MODE = 0o755
#: A workspace with more entries or bytes is not looked at any further.
MAX_ENTRIES = 5_000
MAX_BYTES = 32 << 20
#: Entries at the top that programs leave in a home folder by themselves.
LEFT_BY_PROGRAMS = frozenset({".cache", ".config", ".local", ".gitconfig", ".bash_history", ".lesshst"})
GIT = ".git"
RAN_WEIGHT = 0.1
PROGRESS_WEIGHT = 0.7
#: How many problems a hint names.
MAX_NAMED = 3
#: How much of a wanted text a hint repeats.
MAX_SHOWN = 60


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


Workspace = Mapping[str, WorkspaceItem]


@dataclass(frozen=True, slots=True)
class WorkspaceScore:
    """What is right in a workspace, and what is wrong."""

    progress: float
    kept: float
    problems: tuple[str, ...] = ()
    """What is wrong, each as a sentence."""

    @property
    def solved(self) -> bool:
        return not self.problems

    def reward(self, *, ran: bool) -> float:
        return 1.0 if self.solved else RAN_WEIGHT * ran + PROGRESS_WEIGHT * self.progress * self.kept

    @property
    def hint(self) -> str:
        return " ".join(self.problems[:MAX_NAMED])


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One check of a task."""

    problem: str
    """What is wrong, as a sentence; empty if nothing."""
    kept: bool
    """Whether it was so from the start, and only had to stay."""


def score(
    before: Workspace, after: Workspace, changes: Mapping[str, Any], checks: Sequence[CheckResult]
) -> WorkspaceScore:
    """Compare a workspace with what it should be.

    `changes` has the entries that a task changes, None for those that have to be gone. An entry that may have any
    content and was there from the start only has to stay.
    """
    problems = {path: problem_with(path, entry, before, after) for path, entry in changes.items()}
    any_content = {path for path, entry in changes.items() if isinstance(entry, Mapping) and entry.get("any")}
    goals = [problem for path, problem in problems.items() if path not in any_content & before.keys()]
    goals += [check.problem for check in checks if not check.kept]
    staying = [_harm(path, before, after) for path in before if not _belongs(path, changes)]
    staying += [problems[path] for path in any_content if path in before]
    staying += [check.problem for check in checks if check.kept]
    extra = _extra(before, after, changes)
    unmet = [*filter(None, goals)]
    harm = [*filter(None, staying)]
    progress = 1 - len(unmet) / len(goals) if goals else 1.0
    kept = (len(staying) - len(harm)) / (len(staying) + len(extra)) if staying or extra else 1.0
    return WorkspaceScore(progress, kept, (*unmet, *harm, *(f"{path} does not belong there." for path in extra)))


def _harm(path: str, before: Workspace, after: Workspace) -> str:
    if after.get(path) == before[path]:
        return ""
    return f"{path} must not be {'changed' if path in after else 'deleted'}."


def problem_with(path: str, entry: Any, before: Workspace, after: Workspace) -> str:
    """Why a goal is not met, as a sentence; empty if it is met."""
    item = after.get(path)
    if entry is None:
        return "" if item is None else f"{path} must be gone."
    if item is None:
        return f"{path} is missing."
    wanted = entry if isinstance(entry, Mapping) else {"text": entry}
    if item.kind != (FOLDER if wanted.get("dir") else FILE):
        return f"{path} must be a {'folder' if wanted.get('dir') else 'file'}."
    if "text" in wanted and not same_text(item.content, wanted["text"]):
        return f"{path} must contain {_shown(wanted['text'])}."
    if "json" in wanted and not _same_value(item.content, wanted["json"]):
        return f"{path} must contain the JSON {_shown(json.dumps(wanted['json']))}."
    if "mode" in wanted and item.mode != wanted["mode"]:
        return f"{path} must have the mode {wanted['mode']:o}, not {item.mode:o}."
    if "mode" not in wanted and path in before and item.mode != before[path].mode:
        return f"{path} must keep the mode {before[path].mode:o}."
    return ""


def same_text(content: bytes, text: str) -> bool:
    """Whether a file has a text, whatever spaces stand at the ends of its lines and whether its last line ends."""
    return [line.strip() for line in content.decode("utf-8", "replace").strip().splitlines()] == [
        line.strip() for line in text.strip().splitlines()
    ]


def _same_value(content: bytes, wanted: Any) -> bool:
    try:
        return same_json(json.loads(content), wanted)
    except (ValueError, RecursionError):
        return False


def _belongs(path: str, changes: Mapping[str, Any]) -> bool:
    """Whether an entry is one that a task changes, or is in a folder that has to be gone."""
    return path in changes or any(changes.get(parent, "") is None for parent in _parents(path))


def _extra(before: Workspace, after: Workspace, changes: Mapping[str, Any]) -> list[str]:
    """The entries that were not there and are not wanted; what is in such a folder is not counted."""
    folders = {parent for path, entry in changes.items() if entry is not None for parent in _parents(path)}
    return _topmost([path for path in after if path not in before and path not in changes and path not in folders])


def _topmost(paths: Sequence[str]) -> list[str]:
    listed = set(paths)
    return [path for path in paths if not any(parent in listed for parent in _parents(path))]


def _parents(path: str) -> list[str]:
    return [str(parent) for parent in PurePosixPath(path).parents][:-1]


def _shown(text: str) -> str:
    text = text.strip()
    return json.dumps(text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "…", ensure_ascii=False)
