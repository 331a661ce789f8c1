"""Reads and changes the configuration files of clients."""

import contextlib
import difflib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openclaw_rl.connect.edits import CannotEdit, Edit
from openclaw_rl.errors import UserError

#: Added to a file's name: the copy of how it was before, and the one of what was written.
BEFORE, WRITTEN = ".before-openclaw-rl", ".by-openclaw-rl"
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

    - `apply` and `revert` write all or nothing, and refuse if the file has changed in between.
    - Copies are kept of the file without our settings and of what was written, so that undoing can tell our settings
      from the user's. An empty copy means that there was no file.
    - A symbolic link stays one: the file that it leads to is changed.
    - The file keeps its permissions. A new file is readable by its owner only.
    """

    path: Path
    old: str
    new: str
    before: str
    """The file without our settings."""

    @property
    def is_needed(self) -> bool:
        return self.old != self.new

    def diff(self, secret: str) -> list[str]:
        """The lines that change, as a unified diff that shows neither this secret nor others."""
        old = self.old.splitlines()
        new = self.new.splitlines()
        diff = difflib.unified_diff(old, new, str(self.path), str(self.path), lineterm="")
        return [hide(line, secret) for line in diff]

    def apply(self) -> None:
        """Add our settings. Raises UserError."""
        with self._writing():
            mode = mode_of(self.path)
            for suffix, text in ((BEFORE, self.before), (WRITTEN, self.new)):
                write(copy_of(self.path, suffix), text, mode)
            write(self.path.resolve(), self.new, mode)

    def revert(self) -> None:
        """Take our settings out: the copies go, and the file too if nothing remains. Raises UserError."""
        with self._writing():
            if self.new:
                write(self.path.resolve(), self.new, mode_of(self.path))
            else:
                self.path.resolve().unlink(missing_ok=True)
            for suffix in (BEFORE, WRITTEN):
                copy_of(self.path, suffix).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        if read_text(self.path) != self.old:
            raise UserError(f"{self.path} was changed in the meantime: run the command again.")
        try:
            yield
        except OSError as error:
            raise UserError(f"{self.path} cannot be written: {error.strerror}.") from None


def addition(path: Path, edit: Edit) -> Change:
    """The change that adds a client's settings to its file. Raises UserError."""
    old = read_text(path)
    with leaving(path, "Add what --print shows by hand."):
        before = text_without(path, edit) if is_connected(path) else old
        new = edit.add(before)
        # A client may have written the same settings in another order.
        is_same = bool(old) and edit.read(new) == edit.read(old)
    return Change(path, old, old if is_same else new, before)


def removal(path: Path, edit: Edit) -> Change:
    """The change that takes the settings out again. Raises UserError if they were never added."""
    if not is_connected(path):
        raise UserError(f"There is nothing to undo: openclaw-rl connect has not changed {path}.")
    with leaving(path, "Take them out by hand."):
        new = text_without(path, edit)
    return Change(path, read_text(path), new, new)


def text_without(path: Path, edit: Edit) -> str:
    """The text of a connected file without our settings."""
    text, before, written = (read_text(file) for file in (path, copy_of(path, BEFORE), copy_of(path, WRITTEN)))
    rest = before if text == written else edit.remove(text, before, written)
    return rest if before or rest.strip() else ""


@contextlib.contextmanager
def leaving(path: Path, instead: str) -> Iterator[None]:
    """Say of a file that cannot be changed that it is left as it is, and what its owner does instead."""
    try:
        yield
    except (CannotEdit, RecursionError) as error:
        why = str(error) if isinstance(error, CannotEdit) else "It is nested too deeply."
        raise CannotEdit(f"{path} is left as it is: {lower_first(why)} {instead}") from None


def lower_first(sentence: str) -> str:
    return sentence[:1].lower() + sentence[1:]


def is_connected(path: Path) -> bool:
    """Whether a file holds settings of `connect`."""
    return all(copy_of(path, suffix).exists() for suffix in (BEFORE, WRITTEN))


def copy_of(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


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
    forms = (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1])
    for form in forms if secret else ():
        line = line.replace(form, "***")
    return SECRET_VALUE.sub(r"\1***", line)
