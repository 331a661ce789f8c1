"""Helpers of the benchmarks: tables, and a description of the machine."""

import os
import platform
from collections.abc import Sequence


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
    return f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which this share of all values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
