"""What each sample of a step taught by top-k distillation, for people who want to look closely: `--record`.

A line a sample: its hints with what teacher and policy had in common under each, by which of them each token was
taught, and for each token the tokens it was taught about with their gaps and weights.
"""

import json
import logging
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any

from openclaw_rl.learn.methods import Weights, distilled_of
from openclaw_rl.learn.topk import Distilled
from openclaw_rl.types import StoredTurn

log = logging.getLogger(__name__)

#: In the run directory.
FILE = "records.jsonl"


class Records:
    """A file that grows with each step; one that cannot be written never stops learning."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, step: int, turns: Sequence[StoredTurn], weights: Weights) -> None:
        lines = [
            {"step": step, "turn": turn.number, "response": turn.response_ids, **record(found)}
            for turn in turns
            if (found := distilled_of(turn, weights)) is not None
        ]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        except OSError as error:
            log.warning("The records of step %d cannot be written: %s", step, error)


def prune(path: Path, kept: Container[int]) -> None:
    """Take out the samples of turns that are not kept: what was forgotten must be in no file."""
    if not path.exists():
        return
    lines = [line for line in path.read_text("utf-8").splitlines(keepends=True) if json.loads(line)["turn"] in kept]
    new = path.with_suffix(".new")
    new.write_text("".join(lines), "utf-8")
    new.replace(path)


def record(found: Distilled) -> dict[str, Any]:
    shares = found.chosen_shares()
    return {
        "hints": [
            {"text": text, "overlap": float(overlap.mean()), "chosen": share}
            for text, overlap, share in zip(found.hints, found.overlaps, shares, strict=True)
        ],
        "chosen": found.chosen.tolist(),
        "overlaps": found.overlaps.tolist(),
        "ids": found.ids.tolist(),
        "counts": found.counts.tolist(),
        "d": found.gaps.tolist(),
        "w": found.weights.tolist(),
    }
