"""Files of a run, beside its ledger, that hold what people said or saw."""

import logging
from collections.abc import Callable
from pathlib import Path
from sqlite3 import Connection

from openclaw_rl.learn import records
from openclaw_rl.ledger import deletion
from openclaw_rl.ledger.deletion import WIPE_LATER
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.ledger.screenshots import delete_screenshots
from openclaw_rl.ledger.sessions import session_ids
from openclaw_rl.ledger.turns import turn_numbers

log = logging.getLogger(__name__)


def finish_deletions(run_dir: Path, db: Connection, say: Callable[[str], None], *, beside_server: bool) -> None:
    """Remove what was deleted from the ledger from all files of the run; `say` is told a sentence about what remains.

    - Removes the records of turns that are not in the ledger, the screenshots of deleted sessions, and what SQLite left
      of deleted rows.
    - A program that is killed before the end leaves the rest to the next call.
    """
    file = run_dir / records.FILE
    try:
        records.prune(file, set(turn_numbers(db)))
    except OSError as error:
        say(f"{file} still has deleted turns, because it could not be written ({error.strerror}): {WIPE_LATER}.")
    finished = delete_screenshots(run_dir, deletion.unfinished(db), session_ids(db, ""), say)
    if remains := deletion.wipe(db, finished, beside_server=beside_server):
        say(f"Remains are still in the ledger's files, because {remains}.")


def finish_interrupted_deletions(run_dir: Path, ledger_dir: Path) -> None:
    """At the start of a server: finish the deletions of a program that was killed, and log what remains."""
    with open_ledger(ledger_dir, create_missing=True) as db:
        if deletion.unfinished(db):
            finish_deletions(run_dir, db, lambda problem: log.warning("%s", problem), beside_server=True)


def reports(run_dir: Path) -> list[Path]:
    """The pages about the run that `openclaw-rl report` wrote into its directory: they quote turns."""
    return sorted(run_dir.glob("report*.html"))
