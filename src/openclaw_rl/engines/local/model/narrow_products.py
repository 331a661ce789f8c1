"""Measures what products with bfloat16 weights gain on this CPU, and whether they are right."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from openclaw_rl.engines.local.model import ops
from openclaw_rl.engines.local.model.decoder import Linear
from openclaw_rl.engines.local.model.packed import has_packed_products, pack

#: Sizes of the products. Several weights take turns where rows are few, because a model's weights do not fit into the
#: processor's cache.
WIDTH, WEIGHTS = 768, 4
#: Rows of several answers at once, of pieces of prompts and of training steps.
SEVERAL_ROWS = (8, 64, 512)
ONE_ROW = "1 row"
#: The measurement ends early where bfloat16 is slower than this with several rows: some processors would take minutes.
HOPELESS = 0.5
#: The same for a first look at a small product, in which the time around the product counts too.
HOPELESS_AT_FIRST = 0.1
FIRST_OUTPUTS = 64
MEASUREMENTS = 5

Product = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Products with bfloat16 weights, compared with those in float32."""

    speedups: dict[str, float]
    """How many times as fast they are, by case; not all cases if one of the first was hopeless."""
    error: float
    """The largest difference from exact sums, as a share of the largest result."""

    @property
    def speedup(self) -> float:
        """The geometric mean over the cases."""
        return math.exp(sum(map(math.log, self.speedups.values())) / len(self.speedups))


class ComparedProduct(NamedTuple):
    """A product that is computed in both precisions, with one or several weights in turn."""

    name: str
    wide: list[list[Product]]
    """In float32. There may be several ways; the fastest counts."""
    narrow: list[Product]
    exact: Product
    """What the first one in bfloat16 would be if only its inputs were rounded."""


@torch.inference_mode()
def measure() -> Measurement:
    """Compare the two precisions, in less than a second. Raises RuntimeError where PyTorch has no such products."""
    with warnings.catch_warnings():
        # Where PyTorch has only a slow product, it warns with a page of addresses.
        warnings.simplefilter("ignore")
        first = forward("first look", [torch.randn(FIRST_OUTPUTS, WIDTH)], SEVERAL_ROWS[0])
        ratio, errors = speedup(first), [error_of(first)]
        if ratio < HOPELESS_AT_FIRST:
            return Measurement({first.name: ratio}, errors[0])
        speedups = {}
        for case in cases([torch.randn(WIDTH, WIDTH) for _ in range(WEIGHTS)]):
            speedups[case.name] = speedup(case)
            errors.append(error_of(case))
            if speedups[case.name] < HOPELESS and case.name != ONE_ROW:
                break
    # Unlike Python's, this maximum is NaN if one of them is.
    return Measurement(speedups, float(torch.tensor(errors).max()))


def cases(weights: Sequence[Tensor]) -> Iterator[ComparedProduct]:
    """What sampler and learner compute. One row may be slower without being hopeless, so it comes last."""
    for rows in SEVERAL_ROWS:
        yield forward(f"{rows} rows", weights if rows < SEVERAL_ROWS[-1] else weights[:1], rows)
    yield backward("backward", weights[0], SEVERAL_ROWS[-1])
    yield forward(ONE_ROW, weights, 1)


def forward(name: str, weights: Sequence[Tensor], rows: int) -> ComparedProduct:
    x, narrow = torch.randn(rows, WIDTH), [weight.to(torch.bfloat16) for weight in weights]
    wide: list[list[Product]] = [[partial(ops.linear, x, weight) for weight in weights]]
    if rows > 1 and has_packed_products():
        wide.append([partial(pack(Linear(weight)), x) for weight in weights])
    return ComparedProduct(
        name,
        wide,
        [partial(ops.linear, x, weight) for weight in narrow],
        partial(ops.linear, x.to(torch.bfloat16).float(), narrow[0].float()),
    )


def backward(name: str, weight: Tensor, rows: int) -> ComparedProduct:
    grad, narrow = torch.randn(rows, WIDTH), weight.to(torch.bfloat16)
    return ComparedProduct(
        name,
        [[partial(ops.linear_backward, grad, weight)]],
        [partial(ops.linear_backward, grad, narrow)],
        partial(ops.linear_backward, grad.to(torch.bfloat16).float(), narrow.float()),
    )


def speedup(case: ComparedProduct) -> float:
    """How many times as fast a case is in bfloat16: the best of several measurements of each way, in turn."""
    ways = [*case.wide, case.narrow]
    for products in ways:
        products[0]()  # The first call of a kind prepares something.
    rounds = [[seconds(products) for products in ways] for _ in range(MEASUREMENTS)]
    *wide, narrow = (min(times) for times in zip(*rounds, strict=True))
    ratio: float = min(wide) / narrow
    return ratio


def seconds(products: Sequence[Product]) -> float:
    start = time.perf_counter()
    for product in products:
        product()
    return max(time.perf_counter() - start, 1e-9)


def error_of(case: ComparedProduct) -> float:
    exact = case.exact()
    return float((case.narrow[0]() - exact).abs().max() / exact.abs().max())
