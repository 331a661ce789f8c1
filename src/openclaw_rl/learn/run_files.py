"""Files of a run, beside its ledger, that hold what people said or saw."""

from collections.abc import Collection
from pathlib import Path

from openclaw_rl.learn import records
from openclaw_rl.ledger.reader import LedgerReader
from openclaw_rl.ledger.screenshots import delete_screenshots


def delete_from_files(run_dir: Path, reader: LedgerReader, sessions: Collection[str] = ()) -> list[Path]:
    """Delete the records of turns that are not in the ledger, and the screenshots of deleted sessions.

    Returns what could not be deleted. A screenshot stays while another owner has a session of that name.
    """
    records.prune(run_dir / records.FILE, set(reader.turn_numbers()))
    return delete_screenshots(run_dir, sessions, reader.session_ids("")) if sessions else []


def reports(run_dir: Path) -> list[Path]:
    """The pages about the run that `openclaw-rl report` wrote into its directory: they quote turns."""
    return sorted(run_dir.glob("report*.html"))
