"""The results of a run that may be stopped: a line of JSON for each item as soon as it is done."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.errors import UserError
from openclaw_rl.lab.commands import write_text
from openclaw_rl.lab.tasks import read_json_lines

#: A line with this name says that an item began.
BEGUN = "begun"


class ResultLog:
    """A file with a head, and with the lines of the items that are done. A run with the same file goes on."""

    def __init__(
        self, path: Path, head: Mapping[str, Any], fixed: Collection[str], key: Sequence[str] = ("item",)
    ) -> None:
        """`fixed` are the names of the head that must be equal, `key` those by which the line of an item is known.

        Raises UserError if there are results of another head.
        """
        self.path, self.head, self._key = path, head, key
        found, *lines = (whole_lines(path) if path.exists() else []) or [{}]
        self.lines: list[Mapping[str, Any]] = [line for line in lines if BEGUN not in line]
        """Of all items that are done, also before this run."""
        differs = next((name for name in fixed if name not in found or found[name] != head[name]), "")
        if differs and self.lines:
            raise UserError(f"{path} has results of another {differs}, {found.get(differs)}: give another --out.")
        self._begun = [] if differs else [line[BEGUN] for line in lines if BEGUN in line]
        if differs:
            write_text(path, "")
            self._write(head)

    @property
    def done(self) -> set[tuple[str, ...]]:
        """The keys of the items that are done."""
        return {tuple(line[name] for name in self._key) for line in self.lines}

    def begin(self, key: list[str]) -> int:
        """Note that an item begins; how often it has begun, with this time."""
        self._begun.append(key)
        self._write({BEGUN: key})
        return self._begun.count(key)

    def add(self, line: Mapping[str, Any]) -> None:
        self.lines.append(line)
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def whole_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a file, from which the last is taken away if a killed run has not written it to its end."""
    text = path.read_text("utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        write_text(path, whole)
    return [line for _, line in read_json_lines(path, "--out")]
