"""Fits the weights with which the rules tell wishes for all answers from other messages (`judge/rules/grammar.py`).

Logistic regression with a penalty on large weights, on `lasting_wishes_tuning.jsonl` and `lasting_wishes_own.jsonl` of
`tests/judge`. It prints what eight-fold cross-validation finds; with `--write` it puts the weights into the English
phrase file. `lasting_wishes_development.jsonl` and `lasting_wishes_sealed.jsonl` are not read.

    python benchmarks/wish_weights.py [--write]
"""

import argparse
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from common import machine, sized, table

from openclaw_rl.judge.rules.grammar import LEAST, Scale, all_grammars
from openclaw_rl.judge.rules.text import shorten, without_code
from openclaw_rl.judge.rules.wishes import asks_for_document, weigh, without_material

ROOT = Path(__file__).resolve().parents[1]
PHRASES = ROOT / "src/openclaw_rl/judge/rules/languages/en.toml"
SETS = ("lasting_wishes_tuning.jsonl", "lasting_wishes_own.jsonl", "wishes.jsonl")
#: A note that nobody wished for is worse than a wish that was missed.
WEIGHT_OF_NONE = 1.6
#: On the weights of signals and of words.
PENALTY = 3.0
#: A word that fewer messages have gets no weight, and neither does one whose weight would be smaller.
LEAST_MESSAGES, LEAST_WEIGHT = 4, 0.15
STEPS = sized(300, 5)
FOLDS = sized(8, 2)
#: Circumstances and signals that the sets have too seldom. Their weights are set by hand.
BY_HAND = {"quotes_answer": 2.0, "answers_question": -0.5, "where_is": 3.0}


class Given(NamedTuple):
    """What the weights are fitted on."""

    found: frozenset[str]
    """The signals of a message."""
    wished: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the weights into the phrase file")
    arguments = parser.parse_args()
    cases = [case for name in SETS for case in read_cases(ROOT / "tests/judge" / name)]
    counts = Counter(name for case in cases for name in case.found)
    signals = [name for name in scale().weights if name in signal_names() and name not in BY_HAND]
    names = [*signals, *(word for word, n in counts.items() if n >= LEAST_MESSAGES and word not in signal_names())]
    given = torch.tensor([[float(name in case.found) for name in names] for case in cases], dtype=torch.float64)
    wished = torch.tensor([float(case.wished) for case in cases], dtype=torch.float64)
    fold = torch.arange(len(cases)) * 5 % FOLDS
    scores = torch.zeros_like(wished)
    for n in range(FOLDS):
        scores[fold == n] = given[fold == n] @ fit(given[fold != n], wished[fold != n], names)
    accepted = scores > LEAST
    right, false = int(accepted[wished == 1].sum()), int(accepted[wished == 0].sum())
    weights = dict(zip(names, fit(given, wished, names).tolist(), strict=True)) | BY_HAND
    listed = sorted(weights.items(), key=lambda pair: -pair[1])
    table(f"Weights ({machine()})", ("signal", "weight"), [(name, f"{weight:+.1f}") for name, weight in listed])
    print(f"cross-validation: {right} of {int(wished.sum())} wishes, {false} of {int((1 - wished).sum())} others")
    if arguments.write:
        write(weights)


def signal_names() -> set[str]:
    """The names of signals and circumstances; other names are words."""
    given = tomllib.loads(PHRASES.read_text("utf-8"))["weighed"]
    return {*given["circumstances"], *(one["name"] for one in given["signals"])}


def scale() -> Scale:
    """The English signals."""
    return next(grammar.scale for grammar in all_grammars() if grammar.scale)


def read_cases(path: Path) -> Iterator[Given]:
    """The English messages of a set that are not held out, with their signals."""
    for case in map(json.loads, path.read_text("utf-8").splitlines()):
        words = without_material(without_code(shorten(case["message"])).strip())
        response = case.get("answer", "")
        about_document = asks_for_document(case.get("question", case.get("request", "")))
        if case.get("held_out") or weigh(words, response, about_document)[1] is None:
            continue
        said, asks = scale().read(words)
        # Patterns read the wishes of the oldest set. Only what is none counts there.
        if not case.get("wishes"):
            yield Given(scale().found(words, said, asks, response, about_document), bool(case.get("wish")))


def fit(given: torch.Tensor, wished: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
    """The weights of logistic regression, The bias has no penalty."""
    weights = torch.zeros(len(names), dtype=torch.float64)
    penalty = torch.tensor([0.0 if name == "bias" else PENALTY for name in names], dtype=torch.float64)
    importance = torch.where(wished == 1, 1.0, WEIGHT_OF_NONE)
    weights.requires_grad_()
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
    """Replace the weights in the phrase file."""
    text = PHRASES.read_text("utf-8")
    known = signal_names()
    for name in known & weights.keys():
        signal = re.compile(rf'(name = "{name}"\nweight = )\S+')
        pattern = signal if signal.search(text) else re.compile(rf"(?m)^({name} = )-?[\d.]+$")
        text = pattern.sub(rf"\g<1>{weights[name]:.1f}", text)
    groups: dict[str, list[str]] = {}
    for word in sorted(weights.keys() - known):
        if abs(weights[word]) >= LEAST_WEIGHT:
            groups.setdefault(f"{weights[word]:.1f}", []).append(word)
    listed = sorted(groups.items(), key=lambda pair: -float(pair[0]))
    words = "".join(f'[[weighed.words]]\nweight = {one}\nof = "{" ".join(of)}"\n' for one, of in listed)
    start, end = text.index("[[weighed.words]]"), text.index("[weighed.circumstances]")
    PHRASES.write_text(text[:start] + words + text[end:], "utf-8")


if __name__ == "__main__":
    main()
