"""The results of a run that may be stopped: a line of JSON for each item as soon as it is done."""

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from openclaw_rl.errors import UserError
from openclaw_rl.lab.commands import write_text
from openclaw_rl.lab.tasks import read_json_lines

#: A line with this name says that an item began.
BEGUN = "begun"


class ResultLog:
    """A file with a head, and with the lines of the items that are done. A run with the same file goes on."""

    def __init__(self, path: Path, head: Mapping[str, Any], fixed: Collection[str]) -> None:
        """`fixed` are the names of the head that must be equal. Raises UserError if there are results of another."""
        self.path, self.head = path, head
        found, *lines = [line for _, line in read_json_lines(path, "--out")] if path.exists() else [{}]
        self.lines = [line for line in lines if BEGUN not in line]
        """Of all items that are done, also before this run."""
        self._begun = [line[BEGUN] for line in lines if BEGUN in line]
        if not self.lines:
            write_text(path, "")
            self._write(head)
        elif differs := next((name for name in fixed if found.get(name) != head[name]), ""):
            raise UserError(f"{path} has results of another {differs}, {found.get(differs)}: give another --out.")

    def begin(self, key: list[str]) -> int:
        """Note that an item begins; how often it has begun, with this time."""
        self._begun.append(key)
        self._write({BEGUN: key})
        return self._begun.count(key)

    def add(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        self._write(line)

    def _write(self, line: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
