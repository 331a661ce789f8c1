"""The scenarios by name, and how one is run."""

import signal
import time
from collections.abc import Callable
from typing import Any, NoReturn

from chaos import (
    bad_judges,
    crowded_page,
    damaged_rows,
    full_disk,
    fuzz,
    greedy_rewards,
    hostile_files,
    kills,
    slow_clients,
    soak,
    workers,
)
from chaos.report import Report, Setting

SCENARIOS: dict[str, Callable[[Report, Setting], None]] = {
    "fuzz": fuzz.run,
    "kills": kills.run,
    "slow-clients": slow_clients.run,
    "crowded-page": crowded_page.run,
    "full-disk": full_disk.run,
    "bad-judges": bad_judges.run,
    "workers": workers.run,
    "greedy-rewards": greedy_rewards.run,
    "hostile-files": hostile_files.run,
    "damaged-rows": damaged_rows.run,
    "soak": soak.run,
}
#: A scenario that takes longer has failed.
LIMIT_SECONDS = 2400


def run(name: str, setting: Setting) -> Report:
    """Run one scenario. Whatever it raises is a failure, also that it takes too long."""
    report, started = Report(name), time.monotonic()
    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(LIMIT_SECONDS)
    try:
        SCENARIOS[name](report, setting)
    except Exception as error:  # noqa: BLE001 - the other scenarios run all the same
        report.fail("the scenario stopped", repr(error))
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    report.seconds = time.monotonic() - started
    return report


def stop(*_: Any) -> NoReturn:
    raise TimeoutError(f"it took longer than {LIMIT_SECONDS} s")
