"""Fits the weights with which the rules tell wishes for all answers from other messages (`judge/rules/grammar.py`).

Logistic regression with a penalty on large weights over words, pairs of words and kinds of words, on the sets of
`tests/judge` that are for tuning. It prints what eight-fold cross-validation finds; with `--write` it replaces the
English file of weights. Sets that only measure (`SETS` does not have them) are not read.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch
from common import argument_parser, machine, sized, table

from openclaw_rl.judge.rules.grammar import LEAST, Scale, all_grammars
from openclaw_rl.judge.rules.phrases import shorten, without_code
from openclaw_rl.judge.rules.wishes import asks_for_document, weigh, without_material

ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = ROOT / "src/openclaw_rl/judge/rules/languages/en_wishes.txt"
SETS = (
    "lasting_wishes_tuning.jsonl",
    "lasting_wishes_own.jsonl",
    "lasting_wishes_more_tuning.jsonl",
    "lasting_wishes_fresh_tuning.jsonl",
    "wishes.jsonl",
    "next_states_tuning.jsonl",
)
#: Replies of these kinds state no wish.
NO_WISHES = frozenset({"acknowledgement", "moving_on", "rejection", "repetition", "unclear"})
#: A note that nobody wished for is worse than a wish that was missed.
WEIGHT_OF_NONE = 1.6
PENALTY, PENALTY_OF_KINDS = 1.0, 3.0
#: What fewer messages have gets no weight, and neither does what would weigh less.
LEAST_MESSAGES, LEAST_WEIGHT = 2, 0.05
STEPS = sized(40, 3)
FOLDS = sized(8, 2)
#: Of each set, at most so many are read.
MESSAGES = sized(None, 40)
#: Circumstances that the sets have too seldom. Their weights are set by hand.
BY_HAND = {"=quotes_answer": 2.0, "=answers_question": -0.5, "=misses": 3.0}


class Given(NamedTuple):
    """What the weights are fitted on."""

    found: set[str]
    """What a message has."""
    wished: bool


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--write", action="store_true", help="replace the file of weights")
    arguments = parser.parse_args()
    cases = [case for name in SETS for case in read_cases(ROOT / "tests/judge" / name)]
    counts = Counter(name for case in cases for name in case.found)
    names = sorted(name for name, n in counts.items() if n >= LEAST_MESSAGES and name not in BY_HAND)
    wished = torch.tensor([float(case.wished) for case in cases])
    scores = torch.zeros_like(wished)
    for n in range(FOLDS):
        weights = fit([case for row, case in enumerate(cases) if fold_of(row) != n], names)
        for row, case in enumerate(cases):
            if fold_of(row) == n:
                scores[row] = sum(weights.get(name, 0.0) for name in case.found)
    accepted = scores > LEAST
    right, false = int(accepted[wished == 1].sum()), int(accepted[wished == 0].sum())
    weights = fit(cases, names)
    listed = sorted(weights.items(), key=lambda pair: -abs(pair[1]))[:40]
    table(f"The largest weights ({machine()})", ("of", "weight"), [(name, f"{weight:+.1f}") for name, weight in listed])
    print(f"cross-validation: {right} of {int(wished.sum())} wishes, {false} of {int((1 - wished).sum())} others")
    if arguments.write:
        write(weights)


def scale() -> Scale:
    """The English scale."""
    return next(grammar.scale for grammar in all_grammars() if grammar.scale)


def read_cases(path: Path) -> Iterator[Given]:
    """The English messages of a set that are not held out, with what they have."""
    for case in map(json.loads, path.read_text("utf-8").splitlines()[:MESSAGES]):
        if "next_state" in case:
            if case["language"] != "en" or case["kind"] not in NO_WISHES or case["next_state"][-1]["role"] != "user":
                continue
            case["message"] = case["next_state"][-1]["content"]
        words = without_material(without_code(shorten(case["message"])).strip())
        response = case.get("answer", "")
        about_document = asks_for_document(case.get("question", case.get("request", "")))
        if case.get("held_out") or weigh(words, response, about_document)[1] is None:
            continue
        said, asks = scale().read(words)
        wished = case.get("wish") or any(wish["lasting"] for wish in case.get("wishes", ()))
        yield Given(scale().found(words, said, asks, response, about_document), bool(wished))


def fold_of(row: int) -> int:
    return row * 5 % FOLDS


def fit(cases: Sequence[Given], names: Sequence[str]) -> dict[str, float]:
    """The weights of logistic regression, and those set by hand. The bias has no penalty."""
    places = {name: n for n, name in enumerate(names)}
    found = [[places[name] for name in case.found if name in places] for case in cases]
    starts = torch.tensor([0, *accumulate(len(one) for one in found[:-1])])
    listed = torch.tensor([place for one in found for place in one])
    by_hand = torch.tensor([sum(BY_HAND.get(name, 0.0) for name in case.found) for case in cases])
    wished = torch.tensor([float(case.wished) for case in cases])
    importance = torch.where(wished == 1, 1.0, WEIGHT_OF_NONE)
    penalty = torch.tensor([penalty_of(name) for name in names])
    weights = torch.zeros(len(names), 1, requires_grad=True)
    search = torch.optim.LBFGS([weights], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        sums = torch.nn.functional.embedding_bag(listed, weights, starts, mode="sum").flatten() + by_hand
        error = torch.nn.functional.binary_cross_entropy_with_logits(sums, wished, importance, reduction="sum")
        total = error + (penalty * weights.flatten() ** 2).sum() / 2
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(loss)
    return dict(zip(names, weights.flatten().tolist(), strict=True)) | BY_HAND


def penalty_of(name: str) -> float:
    if name == "=bias":
        return 0.0
    return PENALTY_OF_KINDS if name.startswith("~") else PENALTY


def write(weights: dict[str, float]) -> None:
    """Replace the file of weights: a weight on each line, and what has it."""
    groups: dict[str, list[str]] = {}
    for name in sorted(weights):
        if abs(weights[name]) >= LEAST_WEIGHT:
            groups.setdefault(f"{weights[name]:.1f}", []).append(name)
    listed = sorted(groups.items(), key=lambda pair: -float(pair[0]))
    WEIGHTS.write_text("".join(f"{weight}\t{'|'.join(names)}\n" for weight, names in listed), "utf-8")


if __name__ == "__main__":
    main()
