"""Fits the weights with which the rules tell wishes for all answers from other messages (`judge/rules/grammar.py`).

Logistic regression with a penalty on large weights over words and pairs of words, on the sets of `tests/judge` that are
for tuning. It prints what eight-fold cross-validation finds; with `--write` it replaces the English file of weights.
Sets that only measure (`SETS` does not have them) are not read.

    python benchmarks/wish_weights.py [--write]
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from common import machine, sized, table

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
PENALTY = 1.0
#: What fewer messages have gets no weight, and neither does what would weigh less.
LEAST_MESSAGES, LEAST_WEIGHT = 2, 0.05
STEPS = sized(35, 3)
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="replace the file of weights")
    arguments = parser.parse_args()
    cases = [case for name in SETS for case in read_cases(ROOT / "tests/judge" / name)]
    counts = Counter(name for case in cases for name in case.found)
    names = sorted(name for name, n in counts.items() if n >= LEAST_MESSAGES and name not in BY_HAND)
    places = {name: n for n, name in enumerate(names)}
    given = torch.zeros(len(cases), len(names))
    for row, case in zip(given, cases, strict=True):
        row[[places[name] for name in case.found & places.keys()]] = 1.0
    wished = torch.tensor([float(case.wished) for case in cases])
    fold = torch.arange(len(cases)) * 5 % FOLDS
    scores = torch.zeros_like(wished)
    for n in range(FOLDS):
        scores[fold == n] = given[fold == n] @ fit(given[fold != n], wished[fold != n], names)
    accepted = scores > LEAST
    right, false = int(accepted[wished == 1].sum()), int(accepted[wished == 0].sum())
    weights = dict(zip(names, fit(given, wished, names).tolist(), strict=True)) | BY_HAND
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


def fit(given: torch.Tensor, wished: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """The weights of logistic regression. The bias has no penalty."""
    weights = torch.zeros(len(names), requires_grad=True)
    penalty = torch.tensor([0.0 if name == "=bias" else PENALTY for name in names])
    importance = torch.where(wished == 1, 1.0, WEIGHT_OF_NONE)
    search = torch.optim.LBFGS([weights], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> torch.Tensor:
        search.zero_grad()
        error = torch.nn.functional.binary_cross_entropy_with_logits(
            given @ weights, wished, importance, reduction="sum"
        )
        total = error + (penalty * weights**2).sum() / 2
        total.backward()  # type: ignore[no-untyped-call]
        return total

    search.step(loss)
    return weights.detach()


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
