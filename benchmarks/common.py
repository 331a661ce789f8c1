"""Helpers of the benchmarks: sizes, the model, tables, and a description of the machine.

`BENCH_SMOKE=1` gives every script tiny sizes: the run shows that the script still works, and its numbers mean nothing.
`BENCH_MODEL` names a model to use in place of the embedded one.
"""

import argparse
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from openclaw_rl.models import fetch_model

T = TypeVar("T")

SMOKE = os.environ.get("BENCH_SMOKE") == "1"
MODEL = os.environ.get("BENCH_MODEL")


def sized(real: T, tiny: T) -> T:
    return tiny if SMOKE else real


def model_folder() -> Path:
    cache = os.environ.get("OPENCLAW_RL_CACHE", "~/.cache/openclaw-rl")
    return fetch_model(MODEL, Path(cache).expanduser())


def argument_parser(about: str | None) -> argparse.ArgumentParser:
    """Whose --help says what a script measures, and the variables that all scripts read."""
    form = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(description=about, epilog=(__doc__ or "").partition("\n\n")[2], formatter_class=form)


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print rows in aligned columns."""
    cells = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    print(f"\n{title}")
    for number, row in enumerate(cells):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * width for width in widths))


def verdict(measured: float, bound: float, at_least: bool = True) -> str:
    """A phrase that says whether a target was met."""
    met = measured >= bound if at_least else measured <= bound
    return f"{'≥' if at_least else '≤'} {bound:g}: {'met' if met else 'MISSED'}"


def machine() -> str:
    words = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    return f"{words}; smoke run, not a measurement" if SMOKE else words


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of all values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
