"""Creates and opens a ledger's file, and brings an older one up to date."""

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from openclaw_rl.ledger.errors import LedgerUnusable, NewerLedger
from openclaw_rl.ledger.migrations import MIGRATIONS

#: Name of the ledger in its directory.
FILE = "ledger.sqlite"
#: The prefix of a folder in which a ledger is being created.
UNFINISHED = ".unfinished-"


def create(path: Path) -> None:
    """Create a ledger unless there is one. Its file appears only when it is complete. Raises LedgerUnusable."""
    if path.exists():
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for abandoned in path.parent.glob(f"{UNFINISHED}*"):
            shutil.rmtree(abandoned, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=UNFINISHED) as scratch:
            unfinished = Path(scratch) / FILE
            with contextlib.closing(connect(unfinished)) as connection:
                migrate(connection)
            unfinished.chmod(0o600)
            # A link and not a rename: another program may have been faster, and its ledger must stay.
            os.link(unfinished, path)
    except OSError as error:
        if not path.exists():
            raise LedgerUnusable(f"The ledger {path} cannot be created: {error.strerror}.") from None


def connect(path: Path, *, readonly: bool = False) -> sqlite3.Connection:
    """A connection in autocommit mode; transactions are begun by hand. Raises LedgerUnusable for an empty file.

    SQLite would take an empty file for a new database.
    """
    if path.is_file() and not path.stat().st_size:
        raise LedgerUnusable(
            f"The ledger {path} is empty: all that it recorded is gone from the file. Restore it from a copy, or move "
            "the file away to start a new ledger."
        )
    mode = "ro" if readonly else "rwc"
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None, check_same_thread=False
    )
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


@contextlib.contextmanager
def transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """A transaction that writes: all of the block's changes are made, or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def migrate(connection: sqlite3.Connection) -> None:
    """Bring a ledger up to date, each version in a transaction of its own. Raises NewerLedger."""
    # A deleted session must be gone from the file, not only from the index.
    connection.execute("PRAGMA secure_delete = ON")
    connection.execute("PRAGMA journal_mode = WAL")
    # A commit that was acknowledged survives a power cut too; group commit makes that affordable.
    connection.execute("PRAGMA synchronous = FULL")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version > len(MIGRATIONS):
        raise NewerLedger(
            f"The ledger has schema version {version}; this program knows {len(MIGRATIONS)}. Update the program."
        )
    while version < len(MIGRATIONS):
        version = _step(connection)


def _step(connection: sqlite3.Connection) -> int:
    """One version further, unless another program was faster; the version it is now."""
    with transaction(connection):
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version < len(MIGRATIONS):
            for statement in _statements(MIGRATIONS[version]):
                connection.execute(statement)
            version += 1
            connection.execute(f"PRAGMA user_version = {version}")
    return int(version)


def _statements(script: str) -> Iterator[str]:
    """The statements of a script, which executescript would not run inside a transaction."""
    statement = ""
    for part in script.split(";"):
        statement += part + ";"
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
