"""The ledger's tables, and how its file is created and opened."""

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

from openclaw_rl.ledger.errors import LedgerUnusable, NewerLedger, NoLedger, sqlite_errors_as_sentences
from openclaw_rl.ledger.packing import read_text
from openclaw_rl.ledger.run_dir import make_private

#: The version of the tables in schema.sql. A ledger of another version is not opened: increase this with every change.
VERSION = 21
#: Name of the ledger in its directory.
FILE = "ledger.sqlite"
#: The prefix of a folder in which a ledger is being created.
UNFINISHED = ".unfinished-"
#: How long a command waits for a lock that another program holds.
LOCK_SECONDS = 10


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
                create_tables(connection)
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
    connection.text_factory = read_text
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


@contextlib.contextmanager
def snapshot(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """One moment of the ledger for all reads in the block, which may be inside another such block."""
    is_nested = connection.in_transaction
    if is_nested:
        yield connection
        return
    connection.execute("BEGIN")
    try:
        # SQLite takes the snapshot with the first read, not with BEGIN.
        connection.execute("SELECT 1 FROM sqlite_schema").fetchone()
        yield connection
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


@contextlib.contextmanager
def open_ledger(folder: Path, *, readonly: bool = False, create_missing: bool = False) -> Iterator[sqlite3.Connection]:
    """The ledger in a folder, for a command. Raises LedgerUnusable, also for what fails inside the block.

    A server may use the same ledger meanwhile: a read sees what was committed when it begins (use `snapshot` for
    several), and a change (in a `transaction`) waits `LOCK_SECONDS` for the server's lock.
    """
    path = folder / FILE
    if create_missing:
        with sqlite_errors_as_sentences(folder):
            create(path)
    else:
        check_ledger(folder)
    with sqlite_errors_as_sentences(folder), contextlib.closing(connect(path, readonly=readonly)) as db:
        db.execute(f"PRAGMA busy_timeout = {LOCK_SECONDS * 1000}")
        if readonly:
            check_version(db, folder)
            yield db
            return
        prepare_to_write(db, folder)
        try:
            yield db
        finally:
            make_private(folder)


def check_ledger(folder: Path) -> None:
    """Raise NoLedger unless the folder has one."""
    if not (folder / FILE).is_file():
        raise NoLedger(
            f"There is no ledger in {folder.absolute()}: no server has recorded anything there. Start one with "
            "openclaw-rl serve, or give the --run-dir of another."
        )


def check_version(db: sqlite3.Connection, folder: Path) -> None:
    """Raise LedgerUnusable for a ledger of another version of the program; NewerLedger for one of a newer."""
    (version,) = db.execute("PRAGMA user_version").fetchone()
    if version > VERSION:
        raise NewerLedger(
            f"The ledger in {folder} was written by a newer version of this program (schema version {version}, and "
            f"this program knows {VERSION}). Update the program."
        )
    if version < VERSION:
        raise LedgerUnusable(
            f"The ledger in {folder} was written by an older version of this program: export its sessions with that "
            "version (openclaw-rl export), and import the file into another run directory (openclaw-rl import)."
        )


def inspect_ledger(folder: Path) -> int | None:
    """How many turns the ledger in a folder has; None if there is no ledger. Changes nothing.

    Raises LedgerUnusable for a ledger that is damaged or cannot be read.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    with sqlite_errors_as_sentences(folder), contextlib.closing(connect(path, readonly=True)) as db:
        (state,) = db.execute("PRAGMA quick_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(state)
        (turns,) = db.execute("SELECT count(*) FROM turns").fetchone()
    return int(turns)


def prepare_to_write(connection: sqlite3.Connection, folder: Path) -> None:
    """Make changes on a connection durable and deletions final. Raises LedgerUnusable for another version."""
    check_version(connection, folder)
    # A deleted session must be gone from the file, not only from the index.
    connection.execute("PRAGMA secure_delete = ON")
    # A commit that was acknowledged survives a power cut too; group commit makes that affordable.
    connection.execute("PRAGMA synchronous = FULL")


def create_tables(connection: sqlite3.Connection) -> None:
    """Make an empty database a ledger. No other program sees it before it is complete."""
    connection.execute("PRAGMA journal_mode = WAL")
    tables = Path(__file__).with_suffix(".sql").read_text()
    # In one transaction: each waits for the disk.
    connection.executescript(f"BEGIN; {tables} PRAGMA user_version = {VERSION}; COMMIT;")
