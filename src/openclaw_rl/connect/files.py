"""Reads and changes the configuration files of clients."""

import contextlib
import difflib
import json
import os
import re
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from openclaw_rl.errors import UserError

#: Where a setting is: the keys that lead to it.
SettingPath = tuple[str, ...]
#: The first words of a file or a block that is ours.
OURS = "# openclaw-rl: written by `openclaw-rl connect"
END = "# openclaw-rl: end"


class CannotEdit(UserError):
    """A file cannot be changed without a loss; the message is one sentence that says why."""


class Edit(Protocol):
    """A change to a configuration file.

    - The text of a file goes in and comes out; nothing is written.
    - What the file says otherwise stays, also what was added after the change.
    - A file that cannot be parsed, or not be changed without a loss, raises CannotEdit.
    """

    def add(self, text: str) -> str:
        """The text with our settings. An empty text is a file that does not exist. Repeating it changes nothing."""

    def remove(self, text: str, before: str) -> str:
        """The text without our settings, where `before` was the text without them; empty if nothing remains."""

    def snippet(self) -> str:
        """Our settings alone, for a person who adds them."""


@dataclass(frozen=True)
class JsonEdit:
    """Settings of a JSON file. One with comments is refused, because they would be lost."""

    settings: Mapping[SettingPath, Any]

    def add(self, text: str) -> str:
        document = read_json(text)
        for path, value in self.settings.items():
            set_value(document, path, value)
        return write_json(document, text)

    def remove(self, text: str, before: str) -> str:
        document = read_json(text)
        earlier = read_json(before)
        for path in self.settings:
            restore_value(document, path, earlier)
        return write_json(document, text) if document or before else ""

    def snippet(self) -> str:
        return self.add("")


@dataclass(frozen=True)
class WholeFile:
    """A file that is ours as a whole. A file of this name that somebody else has written is refused."""

    content: str

    def add(self, text: str) -> str:
        if text and not text.startswith(OURS):
            raise CannotEdit("It was not written by openclaw-rl.")
        tomllib.loads(self.content)
        return self.content

    def remove(self, text: str, before: str) -> str:
        self.add(text)
        return ""

    def snippet(self) -> str:
        return self.content


@dataclass(frozen=True)
class YamlEdit:
    """Keys at the top of a YAML file, or an item of a list there, as a block between two comments.

    The rest of the file keeps every character. The result is parsed and compared, so a file that is written in an
    unusual way is refused rather than damaged.
    """

    client: str
    keys: Mapping[str, Any] = field(default_factory=dict)
    list_name: str | None = None
    item: Any = None
    """The item of the list, if there is one."""
    whole: Mapping[str, Any] = field(default_factory=dict)
    """What a new file says besides."""

    def add(self, text: str) -> str:
        rest = without_block(text)
        document = read_yaml(rest)
        if clash := next((key for key in self.keys if key in document), None):
            raise CannotEdit(f"It has a setting {clash!r} already.")
        expected = {**({} if rest.strip() else self.whole), **document, **self.keys}
        items = document.get(self.list_name) if self.list_name else None
        if self.list_name:
            if items is not None and not isinstance(items, list):
                raise CannotEdit(f"Its {self.list_name!r} is not a list.")
            expected[self.list_name] = [self.item, *(items or [])]
        changed = self._insert(rest, items) if items else rest + self._block(expected, document)
        if read_yaml(changed) != expected:
            raise CannotEdit("It is written in a way that cannot be extended safely.")
        return changed

    def remove(self, text: str, before: str) -> str:
        return without_block(text)

    def snippet(self) -> str:
        return dump_yaml({**self.keys, **({self.list_name: [self.item]} if self.list_name else {})})

    def _block(self, expected: Mapping[str, Any], document: Mapping[str, Any]) -> str:
        """The block at the end of the file, with whatever the file does not say yet."""
        if self.list_name in document:
            raise CannotEdit(f"Its {self.list_name!r} is empty: delete that line first.")
        return self._between({key: value for key, value in expected.items() if key not in document}, "")

    def _between(self, value: Any, indent: str) -> str:
        lines = dump_yaml(value).splitlines()
        return "".join(f"{indent}{line}\n" for line in (f"{OURS} {self.client}`", *lines, END))

    def _insert(self, text: str, items: Sequence[Any]) -> str:
        """The block before the first item of the list."""
        lines = text.splitlines(keepends=True)
        start = next((at for at, line in enumerate(lines) if line.rstrip() == f"{self.list_name}:"), len(lines))
        for at in range(start + 1, len(lines)):
            if lines[at].lstrip().startswith("- "):
                indent = lines[at][: len(lines[at]) - len(lines[at].lstrip())]
                return "".join((*lines[:at], self._between([self.item], indent), *lines[at:]))
        raise CannotEdit("It is written in a way that cannot be extended safely.")


def without_block(text: str) -> str:
    """The text without the block that is ours. Raises CannotEdit if the block has no end."""
    lines = text.splitlines(keepends=True)
    start = next((at for at, line in enumerate(lines) if line.strip().startswith(OURS)), None)
    if start is None:
        return text if not text or text.endswith("\n") else f"{text}\n"
    end = next((at for at in range(start, len(lines)) if lines[at].strip() == END), None)
    if end is None:
        raise CannotEdit(f"The line {END!r}, which ends the block of openclaw-rl, is missing.")
    return "".join((*lines[:start], *lines[end + 1 :]))


def read_json(text: str) -> dict[str, Any]:
    """The object in a JSON text; {} for an empty one. Raises CannotEdit."""
    try:
        document = json.loads(text, object_pairs_hook=unique_keys) if text.strip() else {}
    except (ValueError, RecursionError):
        raise CannotEdit("It is not plain JSON, and what it says otherwise (comments …) would be lost.") from None
    if not isinstance(document, dict):
        raise CannotEdit("It is not a JSON object.")
    return document


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) < len(pairs):
        raise ValueError("a key is given twice")
    return document


def write_json(document: Mapping[str, Any], like: str) -> str:
    """An object as JSON, indented like the first line of another text."""
    second = like.splitlines()[1] if like.count("\n") else ""
    indent = second[: len(second) - len(second.lstrip())] or "  "
    return json.dumps(document, indent=indent, ensure_ascii=False) + "\n"


def read_yaml(text: str) -> dict[str, Any]:
    """The mapping in a YAML text; {} for an empty one. Raises CannotEdit."""
    import yaml

    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError):
        raise CannotEdit("It is not YAML that can be read.") from None
    if document is not None and not isinstance(document, dict):
        raise CannotEdit("It is not a YAML mapping.")
    return document or {}


def dump_yaml(value: Any) -> str:
    import yaml

    return str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, default_flow_style=False, width=1000))


def value_at(document: Mapping[str, Any], path: SettingPath) -> tuple[bool, Any]:
    """Whether a document has a setting, and its value."""
    value: Any = document
    for key in path:
        if not isinstance(value, dict) or key not in value:
            return False, None
        value = value[key]
    return True, value


def set_value(document: dict[str, Any], path: SettingPath, value: Any) -> None:
    """Set a value. What stands in the place of an object on the way to it is replaced."""
    for key in path[:-1]:
        if not isinstance(document.get(key), dict):
            document[key] = {}
        document = document[key]
    document[path[-1]] = value


def restore_value(document: dict[str, Any], path: SettingPath, earlier: Mapping[str, Any]) -> None:
    """Give a setting the value of an earlier document; without one, delete it and the objects that were made for it."""
    for length in range(1, len(path) + 1):
        existed, value = value_at(earlier, path[:length])
        if existed and (length == len(path) or not isinstance(value, dict)):
            set_value(document, path[:length], value)
            return
    for length in range(len(path), 0, -1):
        if value_at(earlier, path[:length])[0]:
            return
        _, parent = value_at(document, path[: length - 1])
        if not isinstance(parent, dict) or (length < len(path) and parent.get(path[length - 1]) != {}):
            return
        parent.pop(path[length - 1], None)


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
        old = self.old.splitlines()
        new = self.new.splitlines()
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
    old = read_text(path)
    before = read_text(copy_of(path))
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
