"""`make test-chaos`: runs the scenarios, shows a table, and exits with 1 if anything failed."""

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

# As in the tests: a tiny model gains nothing from a second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chaos.report import Report, Setting
from chaos.scenarios import SCENARIOS, run
from support.server_program import ROOT
from support.tiny_models import save_tiny_model

# A table that is cut off at 80 characters cannot be pasted into the docs.
console = Console(width=None if sys.stdout.isatty() else 200)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-chaos CHAOS=…", description=__doc__)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=f"some of {', '.join(SCENARIOS)}; all if none")
    parser.add_argument("--scale", type=float, default=1.0, help="size of each scenario; 0.01 takes a minute or two")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random")
    options = parser.parse_args()
    unknown = set(options.scenarios) - SCENARIOS.keys()
    if unknown:
        parser.error(f"there is no scenario {', '.join(sorted(unknown))}: use some of {', '.join(SCENARIOS)}")
    # Servers that were started are stopped also when this program is.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    reports = []
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder, "tiny"))
        for name in options.scenarios or SCENARIOS:
            setting = Setting(model, Path(folder, name), options.scale, options.seed)
            setting.folder.mkdir()
            console.print(f"[bold]{name}[/bold] …")
            reports.append(run(name, setting))
            show(reports[-1])
    console.print(f"{machine()}, scale {options.scale:g}, seed {options.seed}")
    console.print(table(reports))
    return 1 if any(report.failed for report in reports) else 0


def show(report: Report) -> None:
    """Say how a scenario ended, and what failed."""
    outcome = f"skipped: {report.skipped}" if report.skipped else f"{report.failed.total()} failures"
    console.print(f"[bold]{report.scenario}[/bold]: {outcome}, {report.seconds:.0f} s")
    for sentence in report.failed:
        console.print(f"  [red]×[/red] {escape(printable(report.describe(sentence)))}", soft_wrap=True)


def printable(text: str) -> str:
    """What was sent to the server must not reach the terminal as it is."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def machine() -> str:
    """Where this ran, and on which commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    place = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{place}, commit {commit.stdout.strip() or 'unknown'}"


def table(reports: list[Report]) -> Table:
    shown = Table("scenario", "counts", "failures", "memory before → after", "seconds", box=box.MARKDOWN)
    for report in reports:
        counts = ", ".join(f"{number:,} {what}" for what, number in report.counts.items())
        memory = f"{report.memory[0]:.0f} → {report.memory[1]:.0f} MiB" if report.memory else "–"
        failures = "skipped" if report.skipped else str(report.failed.total())
        shown.add_row(report.scenario, report.skipped or counts, failures, memory, f"{report.seconds:.0f}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
