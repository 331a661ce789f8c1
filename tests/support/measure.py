"""Measures the feedback reader on labelled next states: `python tests/support/measure.py FILE`.

A file has one case per line: language, request, response, next_state, kind, and whether a hint is due. The score is the
part of a kind that training uses: +1 or -1. A case that is labelled unclear but gets a score counts as wrong.
"""

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclaw_rl.judge.rules import ReplyKind, read_reply

Case = dict[str, Any]
POSITIVE = {ReplyKind.ACKNOWLEDGEMENT, ReplyKind.MOVING_ON, ReplyKind.TOOL_SUCCESS}
NEGATIVE = set(ReplyKind) - POSITIVE - {ReplyKind.UNCLEAR}


@dataclass
class Tally:
    """The reader's results on some cases."""

    labelled: Counter[ReplyKind] = field(default_factory=Counter)
    read: Counter[ReplyKind] = field(default_factory=Counter)
    right: Counter[ReplyKind] = field(default_factory=Counter)
    scored: Counter[ReplyKind] = field(default_factory=Counter)
    """Kinds that were read, where the score is right."""
    wrong_sign: int = 0
    missing_hints: int = 0

    def precision(self, kind: ReplyKind | None = None) -> float:
        """The share of what was read (as one kind, or as anything but unclear) that is right."""
        return share(self.right, self.read, kind)

    def score_precision(self, kind: ReplyKind | None = None) -> float:
        """The share of what was read that has the right score."""
        return share(self.scored, self.read, kind)

    def coverage(self, kind: ReplyKind | None = None) -> float:
        """The share of what is labelled (with one kind, or anything but unclear) that was read rightly."""
        return share(self.right, self.labelled, kind)


def share(part: Counter[ReplyKind], whole: Counter[ReplyKind], kind: ReplyKind | None) -> float:
    """The share of one count in another, for one kind or for all but unclear; 1 if there are none."""
    kinds = [kind] if kind else [each for each in ReplyKind if each is not ReplyKind.UNCLEAR]
    total = sum(whole[each] for each in kinds)
    return sum(part[each] for each in kinds) / total if total else 1.0


def read_cases(path: Path) -> list[Case]:
    """The cases of a file."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def measure(cases: Iterable[Case]) -> Tally:
    """Read every case and compare with its label."""
    tally = Tally()
    for case in cases:
        label = ReplyKind(case["kind"])
        reading = read_reply(case["request"], case["response"], case["next_state"])
        tally.labelled[label] += 1
        tally.read[reading.kind] += 1
        tally.right[label] += reading.kind is label
        tally.scored[reading.kind] += sign(label) == sign(reading.kind)
        tally.wrong_sign += sign(label) * sign(reading.kind) < 0
        tally.missing_hints += reading.kind is label and bool(reading.hint) != case["hint"]
    return tally


def measure_signs(cases: Iterable[Case]) -> dict[int, tuple[float, float]]:
    """Precision and recall of each score, and of abstaining (0)."""
    pairs = [
        (sign(ReplyKind(case["kind"])), sign(read_reply(case["request"], case["response"], case["next_state"]).kind))
        for case in cases
    ]
    shares = {}
    for score in (1, -1, 0):
        right = sum(pair == (score, score) for pair in pairs)
        read = sum(given == score for _, given in pairs)
        labelled = sum(label == score for label, _ in pairs)
        shares[score] = (right / max(1, read), right / max(1, labelled))
    return shares


def measure_by_language(cases: Iterable[Case]) -> dict[str, Tally]:
    """The same for each language, those with most cases first."""
    by_language: dict[str, list[Case]] = defaultdict(list)
    for case in cases:
        by_language[case["language"]].append(case)
    ordered = sorted(by_language.items(), key=lambda item: -len(item[1]))
    return {language: measure(theirs) for language, theirs in ordered}


def measure_silence(cases: Iterable[Case]) -> Counter[int]:
    """How often each score is due where the reader abstains from a person's words. 0: the label is unclear too."""
    words = (case for case in cases if any(message["role"] == "user" for message in case["next_state"]))
    unread = (
        case
        for case in words
        if read_reply(case["request"], case["response"], case["next_state"]).kind is ReplyKind.UNCLEAR
    )
    return Counter(sign(ReplyKind(case["kind"])) for case in unread)


def sign(kind: ReplyKind) -> int:
    """The score that a kind gives the response; 0 if it gives none."""
    if kind is ReplyKind.UNCLEAR:
        return 0
    return 1 if kind in POSITIVE else -1


def table(tally: Tally) -> str:
    """The tally as a Markdown table by kind."""
    lines = heading("Kind")
    for kind in ReplyKind:
        if kind is not ReplyKind.UNCLEAR:
            lines.append(row(kind.value, tally, kind))
    return "\n".join([*lines, row("all of these", tally)])


def language_table(tallies: Mapping[str, Tally]) -> str:
    """Tallies as a Markdown table by language."""
    return "\n".join([*heading("Language"), *(row(language, tally) for language, tally in tallies.items())])


def sign_table(signs: Mapping[int, tuple[float, float]]) -> str:
    """The shares of each score as a Markdown table."""
    lines = ["| Score | Precision | Recall |", "| ---: | ---: | ---: |"]
    return "\n".join([*lines, *(f"| {score:+d} | {p:.3f} | {r:.3f} |" for score, (p, r) in signs.items())])


def heading(name: str) -> list[str]:
    """The first lines of a table."""
    return [f"| {name} | Cases | Precision | Of the score | Coverage |", "| --- | ---: | ---: | ---: | ---: |"]


def row(name: str, tally: Tally, kind: ReplyKind | None = None) -> str:
    """One line of a table; cases are those labelled with the kind, or anything but unclear."""
    clear = tally.labelled.total() - tally.labelled[ReplyKind.UNCLEAR]
    cases = tally.labelled[kind] if kind else clear
    numbers = (tally.precision(kind), tally.score_precision(kind), tally.coverage(kind))
    return f"| {name} | {cases} | " + " | ".join(f"{number:.3f}" for number in numbers) + " |"


def main() -> None:
    """Print the tables for a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="labelled next states, one JSON object per line")
    cases = read_cases(parser.parse_args().file)
    tally = measure(cases)
    unclear = tally.labelled[ReplyKind.UNCLEAR]
    silence = measure_silence(cases)
    sys.stdout.write(
        f"{table(tally)}\n\n{language_table(measure_by_language(cases))}\n\n"
        f"{sign_table(measure_signs(cases))}\n\n"
        f"{unclear} cases are unclear; the reader abstained {tally.read[ReplyKind.UNCLEAR]} times. "
        f"Wrong sign: {tally.wrong_sign}. Hint missing or too many: {tally.missing_hints}.\n"
        f"Of a person's messages that it abstains from, {silence[1]} are content, {silence[-1]} complain, "
        f"{silence[0]} neither.\n"
    )


if __name__ == "__main__":
    main()
