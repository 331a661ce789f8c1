"""The repository of an episode: its files as they were, and the edits that the policy made.

- Edits are kept here, outside the sandbox. Every run of tests has a new copy, so nothing lasts that tested code writes.
- The copy by which an episode is judged has the policy's edits of sources only: tests, conftest.py, settings of test
  runners and files that Python loads by itself are as they were.
"""

import os
import re
import shutil
from collections.abc import Collection, Iterator
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Protocol

from openclaw_rl.envs.calls import ToolFailed
from openclaw_rl.envs.swe.packages import Files

#: Edits of these files do not count at the end: by them, tests could be changed or left out.
PROTECTED_NAMES = (
    *("test_*.py", "*_test.py", "tests.py", "conftest.py", "sitecustomize.py", "usercustomize.py", "*.pth"),
    *("pytest.ini", ".pytest.ini", "pytest.toml", ".pytest.toml", "tox.ini", "setup.cfg", "pyproject.toml"),
    *("noxfile.py", "pytest.py"),
)
PROTECTED_FOLDERS = frozenset({"tests"})
#: Folders that an episode does not have: the history may hold the answer.
LEFT_OUT = (".git", "__pycache__")
#: What a path can be.
FILE = "file"
FOLDER = "folder"
#: Largest file that is read or written, and most files that are searched.
MAX_FILE_CHARACTERS = 1_000_000
MAX_SEARCHED_FILES = 5_000
#: Longest name of a file and longest path: a file system takes these, also in a folder for temporary files.
MAX_NAME_BYTES = 255
MAX_PATH_BYTES = 1_000


class SourceTree(Protocol):
    """Files as they were at the start."""

    def paths(self) -> list[str]: ...
    def read(self, path: str) -> str | None:
        """The text of a file; None if there is no such file. Raises ToolFailed if it is not text."""

    def kind(self, path: str) -> str:
        """ "file" or "folder"; empty if there is neither. Links count as neither: an edit takes their place."""

    def copy_to(self, folder: Path) -> None: ...


class TextTree:
    """Files that are held as texts."""

    def __init__(self, files: Files) -> None:
        self._files = files

    def paths(self) -> list[str]:
        return sorted(self._files)

    def read(self, path: str) -> str | None:
        return self._files.get(path)

    def kind(self, path: str) -> str:
        return _kind_among(path, self._files)

    def copy_to(self, folder: Path) -> None:
        for path, text in self._files.items():
            write(folder, path, text)


class FolderTree:
    """Files in a folder. Links are copied as links and not read, so that none leads out of the folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def paths(self) -> list[str]:
        paths = []
        for folder, names, files in os.walk(self._root):
            names[:] = sorted(name for name in names if name not in LEFT_OUT)
            paths += [str((Path(folder) / file).relative_to(self._root)) for file in files]
        return sorted(paths)

    def read(self, path: str) -> str | None:
        file = self._root / path
        if _problem_with(path) or not file.is_file() or file.resolve() != self._root.resolve() / path:
            return None
        try:
            if file.stat().st_size > MAX_FILE_CHARACTERS:
                raise ToolFailed(f"{path} is too large to read.")
            return file.read_bytes().decode()
        except UnicodeDecodeError:
            raise ToolFailed(f"{path} is not text.") from None
        except OSError as error:
            raise ToolFailed(f"{path} cannot be read: {error.strerror}.") from None

    def kind(self, path: str) -> str:
        place = self._root
        for part in path.split("/"):
            place /= part
            if place.is_symlink():
                return ""
        if place.is_dir():
            return FOLDER
        return FILE if place.exists() else ""

    def copy_to(self, folder: Path) -> None:
        shutil.copytree(self._root, folder, symlinks=True, dirs_exist_ok=True, ignore=shutil.ignore_patterns(*LEFT_OUT))


class Repository:
    """A tree, and the edits of one episode."""

    def __init__(self, tree: SourceTree, tests: Collection[str] = ()) -> None:
        """`tests` are paths of tests whose names do not say so."""
        self.tree = tree
        self._tests = frozenset(tests)
        self.edits: dict[str, str] = {}
        """The files that were changed → their texts now."""

    def paths(self) -> list[str]:
        return sorted({*self.tree.paths(), *self.edits})

    def sources(self) -> list[str]:
        """The Python files that are not protected."""
        return [path for path in self.paths() if path.endswith(".py") and not is_protected(path)]

    def read(self, path: str) -> str:
        """The text of a file now. Raises ToolFailed."""
        text = self.edits.get(path)
        if text is None:
            text = self.tree.read(path)
        if text is None:
            raise ToolFailed(f"There is no file {path}.")
        return text

    def edit(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs once, or make a new file if `old` is empty. Raises ToolFailed with the reason."""
        if problem := _problem_with(path):
            raise ToolFailed(problem)
        if not old and self.tree.read(path) is None and path not in self.edits:
            self._refuse_clash(path)
            return self._write(path, new, f"Made {path}.")
        text = self.read(path)
        if not old:
            raise ToolFailed(f"{path} exists already: give the text to replace in 'old'.")
        if old == new:
            raise ToolFailed("The new text is the same as the old text.")
        if (times := text.count(old)) != 1:
            raise ToolFailed(_refusal(path, text, old, times))
        return self._write(path, text.replace(old, new), f"Replaced the text in {path}.")

    def search(self, wanted: str) -> Iterator[tuple[str, int, str]]:
        """Path, number and text of the lines that contain a text."""
        for path in self.paths()[:MAX_SEARCHED_FILES]:
            try:
                lines = self.read(path).splitlines()
            except ToolFailed:
                continue
            yield from ((path, number, line) for number, line in enumerate(lines, 1) if wanted in line)

    def copy_to(self, folder: Path, *, judged: bool) -> None:
        """Write a clean copy with the edits. If it is to be judged, without edits of protected files.

        Programs in a sandbox, which run as another user, can read it whatever the umask is.
        """
        self.tree.copy_to(folder)
        for path, text in self.source_edits().items() if judged else self.edits.items():
            write(folder, path, text)
        let_others_read(folder)

    def source_edits(self) -> dict[str, str]:
        """The edits that count at the end."""
        return {path: text for path, text in self.edits.items() if not is_protected(path) and path not in self._tests}

    def _refuse_clash(self, path: str) -> None:
        """Raise ToolFailed if a new file needs a folder where a file is, or is itself where a folder is."""
        for folder in map(str, PurePosixPath(path).parents[:-1]):
            if FILE in (self.tree.kind(folder), _kind_among(folder, self.edits)):
                raise ToolFailed(f"{folder} is a file, not a folder.")
        if FOLDER in (self.tree.kind(path), _kind_among(path, self.edits)):
            raise ToolFailed(f"{path} is a folder, so no file can have that path.")

    def _write(self, path: str, text: str, done: str) -> str:
        if len(text) > MAX_FILE_CHARACTERS:
            raise ToolFailed(f"{path} would be larger than {MAX_FILE_CHARACTERS} characters.")
        self.edits[path] = text
        return done


def is_protected(path: str) -> bool:
    """Whether edits of a file do not count at the end."""
    *folders, name = PurePosixPath(path).parts
    return bool(PROTECTED_FOLDERS.intersection(folders)) or any(fnmatch(name, known) for known in PROTECTED_NAMES)


def write(folder: Path, path: str, text: str) -> None:
    """Write a file into a copy, in the place of whatever is in its way. Links of the copy are not followed."""
    file = folder / path
    for place in reversed(file.parents[: path.count("/")]):
        if place.is_symlink() or place.is_file():
            place.unlink()
        elif place.is_dir():
            place.chmod(place.stat().st_mode | 0o700)
    if file.is_symlink():
        file.unlink()
    elif file.is_dir():
        shutil.rmtree(file)
    elif file.exists():
        file.chmod(file.stat().st_mode | 0o600)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(text.encode("utf-8", "replace"))


def let_others_read(folder: Path) -> None:
    """Let other users read what is in a folder; who can enter the folder itself does not change."""
    for root, folders, files in os.walk(folder):
        for path in (Path(root, name) for name in (*folders, *files)):
            if not path.is_symlink():
                mode = path.stat().st_mode
                # Others may enter folders and run programs as their owner may.
                path.chmod(mode | 0o044 | (mode & 0o100) >> 3 | (mode & 0o100) >> 6)


def _kind_among(path: str, files: Collection[str]) -> str:
    """What a path is, by the paths of all files."""
    if path in files:
        return FILE
    return FOLDER if any(file.startswith(f"{path}/") for file in files) else ""


def _problem_with(path: str) -> str:
    """Why a path cannot be that of a file in a repository, as a sentence; empty if it can."""
    parts = path.split("/")
    try:
        sizes = [len(part.encode()) for part in parts]
    except UnicodeEncodeError:
        sizes = [0]
    if "\0" in path or 0 in sizes or any(part in (".", "..", *LEFT_OUT) for part in parts):
        return f"{path} is not a path in the repository."
    if max(sizes) > MAX_NAME_BYTES or sum(sizes) + len(parts) > MAX_PATH_BYTES:
        return f"{path[:60]}… is too long for a path."
    return ""


def _refusal(path: str, text: str, old: str, times: int) -> str:
    if times:
        return f"The text occurs {times} times in {path}: give more of the lines around it."
    squeezed = re.sub(r"\s+", "", old)
    if squeezed and squeezed in re.sub(r"\s+", "", text):
        return f"The text is not in {path} with these spaces and line breaks; they have to match exactly."
    return f"The text is not in {path}; it has to match exactly."
