"""Changes to the texts of configuration files: JSON, TOML and YAML."""

import contextlib
import difflib
import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from typing import Any, Protocol

from openclaw_rl.errors import UserError

#: Where a setting is: the keys that lead to it.
SettingPath = tuple[str, ...]
#: The first words of a file or a block that is ours.
OURS = "# openclaw-rl: written by `openclaw-rl connect"
END = "# openclaw-rl: end"
#: From a file's text, the text before our settings and the one with them, to a text without them.
Undoing = Callable[[str, str, str], str]
NOT_SAFE = "It is written in a way that cannot be extended safely."


class CannotEdit(UserError):
    """A file cannot be changed without a loss; the message is one sentence that says why."""


class Edit(Protocol):
    """A change to a configuration file.

    - The text of a file goes in and comes out; nothing is written.
    - What the file says otherwise stays, also what was added or changed after our settings were added.
    - A file that cannot be parsed, or not be changed without a loss, raises CannotEdit.
    """

    def read(self, text: str) -> dict[str, Any]:
        """What a text says."""

    def add(self, text: str) -> str:
        """The text with our settings. An empty text is a file that does not exist."""

    def remove(self, text: str, before: str, written: str) -> str:
        """The text without our settings, where `written` was made from `before`; empty if nothing remains."""

    def snippet(self) -> str:
        """Our settings alone, for a person who adds them."""


@dataclass(frozen=True)
class JsonEdit:
    """Settings of a JSON file. One with comments is refused, because they would be lost."""

    settings: Mapping[SettingPath, Any]

    def read(self, text: str) -> dict[str, Any]:
        return read_json(text)

    def add(self, text: str) -> str:
        document = read_json(text)
        for path, value in self.settings.items():
            set_value(document, path, value)
        return write_json(document, text)

    def remove(self, text: str, before: str, written: str) -> str:
        document = without_ours(read_json(before), read_json(written), read_json(text))
        return write_json(document, text) if document or before else ""

    def snippet(self) -> str:
        return self.add("")


@dataclass(frozen=True)
class TomlEdit:
    """A TOML file that is ours, or that has keys and tables of somebody else besides."""

    content: str

    def read(self, text: str) -> dict[str, Any]:
        return read_toml(text)

    def add(self, text: str) -> str:
        read_toml(text)
        keys, bracket, tables = self.content.partition("\n[")
        changed = f"{keys}\n{with_newline(text)}{bracket}{tables}" if text.strip() else self.content
        read_toml(changed)
        return changed

    def remove(self, text: str, before: str, written: str) -> str:
        return checked(read_toml, text, before, written, [partial(without_our_lines, opens=TOML_OPENS)])

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

    def read(self, text: str) -> dict[str, Any]:
        return read_yaml(text)

    def add(self, text: str) -> str:
        rest = with_newline(without_block(text))
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
            raise CannotEdit(NOT_SAFE)
        return changed

    def remove(self, text: str, before: str, written: str) -> str:
        # An entry of a list that was changed goes as a whole, with the block.
        ways: list[Undoing] = [partial(without_our_lines, opens=YAML_OPENS), lambda *_: without_block(text)]
        return checked(read_yaml, text, before, written, ways)

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
        raise CannotEdit(NOT_SAFE)


def without_block(text: str) -> str:
    """The text without the block that is ours. Raises CannotEdit if the block has no end."""
    lines = text.splitlines(keepends=True)
    start = next((at for at, line in enumerate(lines) if line.strip().startswith(OURS)), None)
    if start is None:
        return text
    end = next((at for at in range(start, len(lines)) if lines[at].strip() == END), None)
    if end is None:
        raise CannotEdit(f"The line {END!r}, which ends the block of openclaw-rl, is missing.")
    return "".join((*lines[:start], *lines[end + 1 :]))


def with_newline(text: str) -> str:
    return text if not text or text.endswith("\n") else f"{text}\n"


#: The value of a setting that a document does not have.
MISSING = object()


def without_ours(before: Any, written: Any, now: Any) -> Any:
    """A value as it is now, less what was written over what was there before. What was changed since stays."""
    if now == written:
        return before
    if written == before:
        return now
    rest: Any
    if isinstance(written, dict) and isinstance(now, dict):
        earlier = before if isinstance(before, dict) else {}
        values = {
            key: without_ours(*(document.get(key, MISSING) for document in (earlier, written, now)))
            for key in dict.fromkeys((*now, *earlier))
        }
        rest = {key: value for key, value in values.items() if value is not MISSING}
    elif isinstance(written, list) and isinstance(now, list):
        ours = [item for item in written if not (isinstance(before, list) and item in before)]
        rest = [item for item in now if not any(is_entry(item, our) for our in ours)]
    else:
        return now
    return rest if rest or isinstance(before, type(rest)) else before


def is_entry(item: Any, ours: Any) -> bool:
    """Whether an item of a list is the one that we wrote, perhaps with changes."""
    if isinstance(item, dict) and isinstance(ours, dict):
        return any(name in ours and item.get(name) == ours[name] for name in ("id", "name"))
    return bool(item == ours)


#: A line that opens a table of TOML, or a key at the top of a YAML file: what follows belongs to it.
TOML_OPENS = re.compile(r"\[")
YAML_OPENS = re.compile(r"[^\s#-]")


def without_our_lines(text: str, before: str, written: str, opens: re.Pattern[str]) -> str:
    """The text without the lines that were added to `before`, but with those that were changed since.

    A line of ours that opens what somebody added to it stays.
    """
    lines, wrote = (source.splitlines(keepends=True) for source in (text, written))
    ours = set(range(len(wrote)))
    for _at, first, size in matches(with_newline(before).splitlines(keepends=True), wrote):
        ours.difference_update(range(first, first + size))
    stays = [True] * len(lines)
    for first, at, size in matches(wrote, lines):
        for offset in range(size):
            stays[at + offset] = first + offset not in ours
    is_needed = False
    for at in reversed(range(len(lines))):
        if opens.match(lines[at]):
            stays[at] = stays[at] or is_needed
            is_needed = False
        elif stays[at] and lines[at].strip() and not lines[at].lstrip().startswith("#"):
            is_needed = True
    return "".join(line for line, does_stay in zip(lines, stays, strict=True) if does_stay)


def matches(first: Sequence[str], second: Sequence[str]) -> Sequence[tuple[int, int, int]]:
    """The runs of lines that two texts have in common: where they begin in each, and their lengths."""
    return difflib.SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks()


def checked(
    read: Callable[[str], dict[str, Any]],
    text: str,
    before: str,
    written: str,
    ways: Sequence[Undoing],
) -> str:
    """The first way's text that says what the file says without our settings. Raises CannotEdit if there is none."""
    expected = without_ours(read(before), read(written), read(text))
    for way in ways:
        with contextlib.suppress(CannotEdit):
            changed = way(text, before, written)
            if read(changed) == expected:
                return changed
    raise CannotEdit("The settings of openclaw-rl were changed in a way that cannot be told from yours.")


def read_json(text: str) -> dict[str, Any]:
    """The object in a JSON text; {} for an empty one. Raises CannotEdit."""
    try:
        document = (
            json.loads(text, object_pairs_hook=unique_keys, parse_float=exact_float, parse_constant=exact_float)
            if text.strip()
            else {}
        )
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


def exact_float(number: str) -> float:
    """A number that can be written as it was read: neither infinite nor longer than a float."""
    value = float(number)
    if Decimal(number) != Decimal(repr(value)) or not Decimal(number).is_finite():
        raise ValueError(f"{number} would change")
    return value


def write_json(document: Mapping[str, Any], like: str) -> str:
    """An object as JSON, with the indentation and the line ends of another text."""
    indented = re.search(r"\n([ \t]+)", like)
    text = json.dumps(document, indent=indented[1] if indented else "  ", ensure_ascii=False) + "\n"
    # Half of a pair stands for no character, so it can only be written as an escape.
    text = re.sub(r"[\ud800-\udfff]", lambda half: f"\\u{ord(half[0]):04x}", text)
    return text.replace("\n", "\r\n") if "\r\n" in like else text


def read_toml(text: str) -> dict[str, Any]:
    """What a TOML text says. Raises CannotEdit."""
    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        raise CannotEdit("It is not TOML that can be read and extended.") from None


def toml_string(text: str) -> str:
    """A TOML string: a JSON string without pairs of surrogates, which TOML does not have."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


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
