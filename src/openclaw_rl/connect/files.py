"""Reads and writes the configuration files of clients."""

import contextlib
import difflib
import json
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.connect.edits import CannotEdit, Edit
from openclaw_rl.errors import UserError

#: Added to a file's name: the copy of how it was before.
COPY_SUFFIX = ".before-openclaw-rl"
#: A larger configuration is a mistake.
MAX_FILE_BYTES = 5_000_000
#: The value of a setting whose name is that of a secret.
SECRET_VALUE = re.compile(
    r"""((?:key|token|secret|password|authorization)["']?\s*[:=]\s*)(?!true\b|false\b|null\b)([^\s,].*)""",
    re.IGNORECASE,
)
#: Only the owner may read a new file: it may hold a key.
PRIVATE = 0o600


@dataclass(frozen=True)
class Change:
    """A change to one file that has been computed and not been made yet.

    - `apply` writes all or nothing, and refuses if the file has changed in between.
    - The first change keeps a copy of the file as it was; an empty copy means that there was no file.
    - A symbolic link stays one: the file that it leads to is changed.
    - The file keeps its permissions. A new file is readable by its owner only.
    """

    path: Path
    old: str
    new: str

    @property
    def is_needed(self) -> bool:
        return self.old != self.new

    def diff(self, secret: str) -> list[str]:
        """The lines that change, as a unified diff that shows neither this secret nor others."""
        old, new = self.old.splitlines(), self.new.splitlines()
        diff = difflib.unified_diff(old, new, str(self.path), str(self.path), lineterm="")
        return [hide(line, secret) for line in diff]

    def apply(self) -> None:
        """Make the change. Raises UserError."""
        if read_text(self.path) != self.old:
            raise UserError(f"{self.path} was changed in the meantime: run the command again.")
        try:
            if not copy_of(self.path).exists():
                write(copy_of(self.path), self.old, mode_of(self.path))
            write(self.path.resolve(), self.new, mode_of(self.path))
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}.") from None

    def revert(self) -> None:
        """Make the change, where it is the one back to how the file was: the copy goes, and an empty file too."""
        if self.new.strip():
            self.apply()
        else:
            self.path.unlink()
        copy_of(self.path).unlink(missing_ok=True)


def addition(path: Path, edit: Edit) -> Change:
    """The change that adds a client's settings to its file. Raises UserError."""
    old = read_text(path)
    return Change(path, old, _of_file(path, lambda: edit.add(old)))


def removal(path: Path, edit: Edit) -> Change:
    """The change that takes the settings out again. Raises UserError if they were never added."""
    if not copy_of(path).exists() or not path.exists():
        raise UserError(f"There is nothing to undo: openclaw-rl connect has not changed {path}.")
    old, before = read_text(path), read_text(copy_of(path))
    return Change(path, old, _of_file(path, lambda: edit.remove(old, before)))


def _of_file(path: Path, change: Callable[[], str]) -> str:
    try:
        return change()
    except CannotEdit as error:
        raise CannotEdit(
            f"{path} is left as it is: {lower_first(str(error))} Add what --print shows by hand."
        ) from None


def lower_first(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def is_connected(path: Path) -> bool:
    """Whether a file holds settings of `connect`."""
    return copy_of(path).exists() and path.exists()


def copy_of(path: Path) -> Path:
    return path.with_name(path.name + COPY_SUFFIX)


def read_text(path: Path) -> str:
    """The text of a file; empty if there is none. Raises UserError."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise UserError(f"{path} is larger than {MAX_FILE_BYTES // 1_000_000} MB: this is no configuration.")
        # Line endings stay as they are.
        return path.read_bytes().decode()
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or 'it is not text'}.") from None


def mode_of(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return path.stat().st_mode & 0o777
    return PRIVATE


def write(path: Path, text: str, mode: int) -> None:
    """Write a whole file, or nothing of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, unfinished = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode())
        os.chmod(unfinished, mode)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        raise


def hide(line: str, secret: str) -> str:
    """A line without a secret, as it is or as JSON and TOML write it, and without what is called a secret."""
    for form in (secret, json.dumps(secret)[1:-1]) if secret else ():
        line = line.replace(form, "***")
    return SECRET_VALUE.sub(r"\1***", line)
