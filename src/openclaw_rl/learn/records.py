"""What each sample of a step taught, for `--record`: one line per sample.

With topk-select a line has the hints with the overlap of teacher and policy under each, the hint that taught each
token, and for each token the tokens it was taught about, with their gaps and weights.
"""

import json
import logging
from collections.abc import Container, Sequence
from pathlib import Path

from openclaw_rl.methods.base import Method
from openclaw_rl.types import StoredTurn

log = logging.getLogger(__name__)

#: In the run directory.
FILE = "records.jsonl"


class Records:
    """Appends the samples of each step to a file. If it cannot be written, that is logged and learning continues."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, turns: Sequence[StoredTurn], method: Method) -> None:
        lines = [
            {"step": step, "turn": turn.number, "response": turn.response_ids, **taught}
            for turn in turns
            if (taught := method.record(turn)) is not None
        ]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        except OSError as error:
            log.warning("The records of step %d cannot be written: %s", step, error)


def prune(path: Path, kept: Container[int]) -> None:
    """Remove the samples of turns that are not in `kept`, because deleted turns must be in no file.

    A line that cannot be read, such as one that a crash cut off, is removed too.
    """
    if not path.exists():
        return
    lines = [line for line in path.read_text("utf-8", "replace").splitlines(keepends=True) if _turn(line) in kept]
    new = path.with_suffix(".new")
    new.write_text("".join(lines), "utf-8")
    new.replace(path)


def _turn(line: str) -> int:
    """The turn of a line; -1 if the line cannot be read."""
    try:
        return int(json.loads(line)["turn"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1
