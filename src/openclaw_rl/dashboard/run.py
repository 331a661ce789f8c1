"""A run as its directory tells it. Nothing in it is changed, and what is missing or broken is said in words."""

import contextlib
import json
import sqlite3
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openclaw_rl.dashboard.examples import Prompt, choose, first_prompts
from openclaw_rl.dashboard.metrics import FILE as METRICS
from openclaw_rl.dashboard.metrics import Metrics, read_metrics
from openclaw_rl.dashboard.source import RunSource
from openclaw_rl.dashboard.verdict_mix import Judged, read_verdicts
from openclaw_rl.learn.checkpoints import RECORD, UNFINISHED, Checkpoint
from openclaw_rl.ledger.queries import load_turn
from openclaw_rl.ledger.schema import FILE, MIGRATIONS, connect
from openclaw_rl.ledger.status import Status, read_status
from openclaw_rl.models import ADAPTER_CONFIG, EMBEDDED
from openclaw_rl.types import StoredTurn

#: Prompts that both models are asked.
PROMPTS = 3
#: A server may hold the ledger for a moment.
LOCK_SECONDS = 10


@dataclass(slots=True)
class Run:
    """All that the page tells of, but for what models would have to be asked."""

    folder: Path
    status: Status
    metrics: Metrics
    model: str
    checkpoints: list[Checkpoint]
    verdicts: list[Judged] = field(default_factory=list)
    turns: list[tuple[str, StoredTurn]] = field(default_factory=list)
    """Examples, each with the reason why it is one."""
    prompts: list[Prompt] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    """What is not there or cannot be read, a sentence each."""


def read_run(source: RunSource, server: str | None, told: Mapping[str, Any]) -> Run:
    """What there is; `told` is what the run's server says of itself, if one runs."""
    folder = source.run_dir
    checkpoints = source.checkpoints.all()
    run = Run(
        folder,
        read_status(None, server, told),
        read_metrics(folder / METRICS),
        source.model_name or base_model(checkpoints) or EMBEDDED,
        checkpoints,
    )
    try:
        with opened(source.ledger_dir) as db:
            read_ledger(run, db, server, told)
    except (sqlite3.Error, ValueError, KeyError, TypeError) as error:
        run.missing.append(f"The ledger in {source.ledger_dir} cannot be read to its end: {error}.")
    except NoLedger as error:
        run.missing.append(str(error))
    run.missing += gaps(run)
    return run


class NoLedger(Exception):
    """There is none that can be read; the message says why and what would help."""


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[sqlite3.Connection]:
    """The ledger at one moment, to read only. Raises NoLedger."""
    path = folder / FILE
    if not path.is_file():
        raise NoLedger(f"There is no ledger in {folder}: no server has recorded a turn there yet.")
    with contextlib.closing(connect(path, readonly=True)) as db:
        db.execute(f"PRAGMA busy_timeout = {LOCK_SECONDS * 1000}")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > len(MIGRATIONS):
            raise NoLedger(f"The ledger in {folder} was written by a newer version of this program: update it.")
        if version < len(MIGRATIONS):
            raise NoLedger(
                f"The ledger in {folder} was written by an older version of this program: "
                "`openclaw-rl status` brings it up to date."
            )
        # All that is read is of the same moment, whatever a server writes meanwhile.
        db.execute("BEGIN")
        yield db


def read_ledger(run: Run, db: sqlite3.Connection, server: str | None, told: Mapping[str, Any]) -> None:
    run.status = read_status(db, server, told)
    run.verdicts = read_verdicts(db)
    run.turns = [(why, load_turn(db, number)) for why, number in choose(db)]
    run.prompts = first_prompts(db, PROMPTS)


def base_model(checkpoints: list[Checkpoint]) -> str:
    """The model that the newest adapter belongs to; empty if none says."""
    if not checkpoints:
        return ""
    for checkpoint in reversed(checkpoints):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            named = json.loads((checkpoint.folder / ADAPTER_CONFIG).read_text()).get("base_model_name_or_path")
            if isinstance(named, str) and named:
                return named
    return ""


def gaps(run: Run) -> Iterator[str]:
    """What a whole run would have and this one has not."""
    if not (run.folder / METRICS).is_file():
        yield f"There is no {METRICS}: no training step has been made yet."
    elif run.metrics.unreadable:
        yield f"Lines of {METRICS} that cannot be read and are left out: {run.metrics.unreadable}."
    found = {checkpoint.folder for checkpoint in run.checkpoints}
    folders = [path.parent for path in (run.folder / "checkpoints").glob(f"*/{RECORD}")]
    for folder in sorted(folder for folder in folders if not folder.name.startswith(UNFINISHED)):
        if folder not in found:
            yield f"The checkpoint {folder.name} is damaged and left out."
