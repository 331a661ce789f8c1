"""Files of a run, beside its ledger, that hold what people said or saw."""

import logging
from collections.abc import Callable
from pathlib import Path

from openclaw_rl.learn import records
from openclaw_rl.ledger.offline import WIPE_LATER, OfflineLedger, open_offline
from openclaw_rl.ledger.screenshots import delete_screenshots

log = logging.getLogger(__name__)


def finish_deletions(run_dir: Path, ledger: OfflineLedger, say: Callable[[str], None], *, beside_server: bool) -> None:
    """Remove what was deleted from the ledger from all files of the run; `say` is told a sentence about what remains.

    - Removes the records of turns that are not in the ledger, the screenshots of deleted sessions, and what SQLite left
      of deleted rows.
    - A program that is killed before the end leaves the rest to the next call.
    """
    file = run_dir / records.FILE
    try:
        records.prune(file, set(ledger.reader.turn_numbers()))
    except OSError as error:
        say(f"{file} still has deleted turns, because it could not be written ({error.strerror}): {WIPE_LATER}.")
    finished = delete_screenshots(run_dir, ledger.unfinished_deletions(), ledger.reader.session_ids(""), say)
    if remains := ledger.wipe(finished, beside_server=beside_server):
        say(f"Remains are still in the ledger's files, because {remains}.")


def finish_interrupted_deletions(run_dir: Path, ledger_dir: Path) -> None:
    """At the start of a server: finish the deletions of a program that was killed, and log what remains."""
    with open_offline(ledger_dir, create=True) as ledger:
        if ledger.unfinished_deletions():
            finish_deletions(run_dir, ledger, lambda problem: log.warning("%s", problem), beside_server=True)


def reports(run_dir: Path) -> list[Path]:
    """The pages about the run that `openclaw-rl report` wrote into its directory: they quote turns."""
    return sorted(run_dir.glob("report*.html"))
