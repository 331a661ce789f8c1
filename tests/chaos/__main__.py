"""`make test-chaos`: runs the scenarios, shows a table, and exits with 1 if anything failed."""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# As in the tests: a tiny model gains nothing from a second thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from chaos import bad_judges, full_disk, fuzz, hostile_files, kills, slow_clients, soak, workers
from chaos.report import Report, Setting
from support.tiny_models import save_tiny_model

Scenario = Callable[[Report, Setting], None]
SCENARIOS: dict[str, Scenario] = {
    "fuzz": fuzz.run,
    "kills": kills.run,
    "slow-clients": slow_clients.run,
    "full-disk": full_disk.run,
    "bad-judges": bad_judges.run,
    "workers": workers.run,
    "hostile-files": hostile_files.run,
    "soak": soak.run,
}
#: A scenario that takes longer has failed.
LIMIT_SECONDS = 2400

console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(prog="make test-chaos ARGS=…", description=__doc__)
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
            reports.append(run(name, setting))
    console.print(table(reports))
    return 1 if any(report.failed for report in reports) else 0


def run(name: str, setting: Setting) -> Report:
    """Run one scenario. Whatever it raises is a failure, also that it takes too long."""
    report, started = Report(name), time.monotonic()
    console.print(f"[bold]{name}[/bold] …")
    signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        SCENARIOS[name](report, setting)
    except Exception as error:  # noqa: BLE001 - the other scenarios run all the same
        report.fail(f"the scenario stopped: {error!r}")
    finally:
        signal.alarm(0)
    report.seconds = time.monotonic() - started
    outcome = f"skipped: {report.skipped}" if report.skipped else f"{report.failed.total()} failures"
    console.print(f"[bold]{name}[/bold]: {outcome}, {report.seconds:.0f} s")
    for sentence, count in report.failed.items():
        example = f", first: {report.examples[sentence]}" if report.examples[sentence] else ""
        console.print(f"  [red]×[/red] {count} × {escape(printable(sentence + example))}", soft_wrap=True)
    return report


def stop(*_: Any) -> NoReturn:
    raise TimeoutError(f"it took longer than {LIMIT_SECONDS} s")


def printable(text: str) -> str:
    """What was sent to the server must not reach the terminal as it is."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def table(reports: list[Report]) -> Table:
    shown = Table("scenario", "counts", "failures", "memory before → after", "seconds")
    for report in reports:
        counts = ", ".join(f"{number:,} {what}" for what, number in report.counts.items())
        memory = f"{report.memory[0]:.0f} → {report.memory[1]:.0f} MiB" if report.memory else "–"
        failures = "skipped" if report.skipped else str(report.failed.total())
        shown.add_row(report.scenario, report.skipped or counts, failures, memory, f"{report.seconds:.0f}")
    return shown


if __name__ == "__main__":
    sys.exit(main())
