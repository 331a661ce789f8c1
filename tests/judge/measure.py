"""Measures the feedback reader on labelled next states: `python tests/judge/measure.py FILE`.

A file has one case a line: language, request, response, next_state, kind, and whether a hint is due.
"""

import argparse
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from openclaw_rl.judge.reader import ReplyKind, read_reply

POSITIVE = {ReplyKind.ACKNOWLEDGEMENT, ReplyKind.MOVING_ON, ReplyKind.TOOL_SUCCESS}


@dataclass
class Tally:
    """How the reader did on some cases."""

    labelled: Counter[ReplyKind] = field(default_factory=Counter)
    read: Counter[ReplyKind] = field(default_factory=Counter)
    right: Counter[ReplyKind] = field(default_factory=Counter)
    wrong_sign: int = 0
    missing_hints: int = 0

    def precision(self, kind: ReplyKind | None = None) -> float:
        """The share of what was read (as one kind, or as anything but unclear) that is right."""
        return share(self.right, self.read, kind)

    def coverage(self, kind: ReplyKind | None = None) -> float:
        """The share of what is labelled (with one kind, or anything but unclear) that was read rightly."""
        return share(self.right, self.labelled, kind)


def share(part: Counter[ReplyKind], whole: Counter[ReplyKind], kind: ReplyKind | None) -> float:
    """The share of one count in another; of all kinds but unclear together, if none is given. 1 of nothing."""
    kinds = [kind] if kind else [each for each in ReplyKind if each is not ReplyKind.UNCLEAR]
    total = sum(whole[each] for each in kinds)
    return sum(part[each] for each in kinds) / total if total else 1.0


def measure(path: Path) -> Tally:
    """Read every case of a file and compare with its label."""
    tally = Tally()
    for line in path.read_text("utf-8").splitlines():
        case = json.loads(line)
        label = ReplyKind(case["kind"])
        reading = read_reply(case["request"], case["response"], case["next_state"])
        tally.labelled[label] += 1
        tally.read[reading.kind] += 1
        tally.right[label] += reading.kind is label
        tally.wrong_sign += ReplyKind.UNCLEAR not in (label, reading.kind) and sign(label) != sign(reading.kind)
        tally.missing_hints += reading.kind is label and bool(reading.hint) != case["hint"]
    return tally


def sign(kind: ReplyKind) -> int:
    """What a kind says of the response; of those that say something."""
    return 1 if kind in POSITIVE else -1


def table(tally: Tally) -> str:
    """The tally as a Markdown table."""
    lines = ["| Kind | Cases | Precision | Coverage |", "| --- | ---: | ---: | ---: |"]
    for kind in ReplyKind:
        if kind is not ReplyKind.UNCLEAR:
            lines.append(row(kind.value, tally.labelled[kind], tally.precision(kind), tally.coverage(kind)))
    clear = tally.labelled.total() - tally.labelled[ReplyKind.UNCLEAR]
    lines.append(row("all of these", clear, tally.precision(), tally.coverage()))
    return "\n".join(lines)


def row(name: str, cases: int, precision: float, coverage: float) -> str:
    """One line of the table."""
    return f"| {name} | {cases} | {precision:.3f} | {coverage:.3f} |"


def main() -> None:
    """Print the table for a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="labelled next states, one JSON object a line")
    tally = measure(parser.parse_args().file)
    unclear = tally.labelled[ReplyKind.UNCLEAR]
    sys.stdout.write(
        f"{table(tally)}\n\n"
        f"{unclear} cases are unclear; the reader abstained {tally.read[ReplyKind.UNCLEAR]} times. "
        f"Wrong sign: {tally.wrong_sign}. Hint missing or too many: {tally.missing_hints}.\n"
    )


if __name__ == "__main__":
    main()
