"""What `--dtype auto` stands for on this CPU: bfloat16 where its products are faster and right, else float32.

A short measurement decides. It is kept in a file, so that later starts decide alike: those on the same kind of
processor, with as many threads and the same PyTorch.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from openclaw_rl.engines.local.model import kept_measurements, ops
from openclaw_rl.engines.local.model.kept_measurements import machine
from openclaw_rl.engines.local.model.linear import Linear
from openclaw_rl.engines.local.model.packed import (
    has_half_products,
    has_packed_products,
    pack,
    pack_half,
    pack_narrow,
)

#: Sizes of the products. Several weights take turns where rows are few, because a model's weights do not fit into the
#: processor's cache.
WIDTH = 768
WEIGHTS = 4
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
#: bfloat16 is chosen if its products are so many times as fast.
LEAST_SPEEDUP = 1.3
#: Results may be wrong by this share of the largest one. Rounding to 8 bits gives at most 0.004, sums in bfloat16 0.06.
MAX_ERROR = 0.01
FILE = "cpu-precision.json"


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
    """In float32. There may be several ways; the fastest counts, here and in bfloat16."""
    narrow: list[list[Product]]
    exact: Product
    """What the first one in bfloat16 would be if only its inputs were rounded."""


@torch.inference_mode()
def measure() -> Measurement:
    """Compare the two precisions, in less than a second. Raises RuntimeError where PyTorch has no such products."""
    with warnings.catch_warnings():
        # Where PyTorch has only a slow product, it warns with a page of addresses.
        warnings.simplefilter("ignore")
        first = forward("first look", [torch.randn(FIRST_OUTPUTS, WIDTH)], SEVERAL_ROWS[0])
        ratio = speedup(first)
        errors = [error_of(first)]
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
    x = torch.randn(rows, WIDTH)
    narrow = [weight.to(torch.bfloat16) for weight in weights]
    wide: list[list[Product]] = [[partial(ops.linear, x, one) for one in weights]]
    narrowed: list[list[Product]] = [[partial(ops.linear, x, one) for one in narrow]]
    # As the sampler multiplies its copies of the weights.
    if has_packed_products():
        wide.append([partial(pack(Linear(one)), x) for one in weights])
    if has_half_products():
        wide.append([partial(pack_half(Linear(one)), x) for one in weights])
    if has_packed_products() and has_half_products():
        narrowed.append([partial(pack_narrow(Linear(one)), x) for one in narrow])
    return ComparedProduct(
        name,
        wide,
        narrowed,
        partial(ops.linear, x.to(torch.bfloat16).float(), narrow[0].float()),
    )


def backward(name: str, weight: Tensor, rows: int) -> ComparedProduct:
    grad = torch.randn(rows, WIDTH)
    narrow = weight.to(torch.bfloat16)
    return ComparedProduct(
        name,
        [[partial(ops.linear_backward, grad, weight)]],
        [[partial(ops.linear_backward, grad, narrow)]],
        partial(ops.linear_backward, grad.to(torch.bfloat16).float(), narrow.float()),
    )


def speedup(case: ComparedProduct) -> float:
    """How many times as fast a case is in bfloat16: the best of several measurements of each way, in turn."""
    ways = [*case.wide, *case.narrow]
    for products in ways:
        products[0]()  # The first call of a kind prepares something.
    rounds = [[seconds(products) for products in ways] for _ in range(MEASUREMENTS)]
    best = [min(times) for times in zip(*rounds, strict=True)]
    ratio: float = min(best[: len(case.wide)]) / min(best[len(case.wide) :])
    return ratio


def seconds(products: Sequence[Product]) -> float:
    start = time.perf_counter()
    for product in products:
        product()
    return max(time.perf_counter() - start, 1e-9)


def error_of(case: ComparedProduct) -> float:
    exact = case.exact()
    return float((case.narrow[0][0]() - exact).abs().max() / exact.abs().max())


class ChosenDtype(NamedTuple):
    """A precision, and why it was chosen."""

    dtype: str
    reason: str = ""


def choose_on_cpu(cache: Path | None, *, keep: bool = True) -> ChosenDtype:
    """Decide by the measurement in the cache folder, or by a new one, which goes there if `keep` is set."""
    file = cache and cache / FILE
    known = read(file)
    here = machine()
    if here in known:
        return choice_of(known[here])
    try:
        measurement = measure()
    except RuntimeError as error:
        return ChosenDtype("float32", f"bfloat16 cannot be computed here: {str(error).partition(chr(10))[0]}")
    if keep:
        write(file, {**known, here: measurement})
    return choice_of(measurement)


def choice_of(measurement: Measurement) -> ChosenDtype:
    if not measurement.error <= MAX_ERROR:
        return ChosenDtype("float32", "bfloat16 gives wrong products here")
    dtype = "bfloat16" if measurement.speedup >= LEAST_SPEEDUP else "float32"
    return ChosenDtype(dtype, f"bfloat16 is {measurement.speedup:.2g} × as fast as float32 here")


def read(file: Path | None) -> dict[str, Measurement]:
    """The measurements in a file, by machine; without those that are damaged."""
    known = {}
    for name, values in kept_measurements.read(file).items():
        with contextlib.suppress(TypeError, ValueError, AttributeError, KeyError):
            speedups = {case: float(ratio) for case, ratio in values["speedups"].items()}
            if speedups and min(speedups.values()) > 0:
                known[name] = Measurement(speedups, float(values["error"]))
    return known


def write(file: Path | None, measurements: dict[str, Measurement]) -> None:
    kept_measurements.write(file, {name: asdict(measurement) for name, measurement in measurements.items()})
