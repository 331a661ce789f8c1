"""Commands about what is recorded; they work beside a server or without one."""

import argparse
import asyncio
import contextlib
import http.client
import json
import sqlite3
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from openclaw_rl.app.config import Config
from openclaw_rl.cli.session_views import list_sessions, show_session
from openclaw_rl.errors import UserError
from openclaw_rl.learn import records
from openclaw_rl.ledger import changes, lock, queries
from openclaw_rl.ledger.lock import read_server
from openclaw_rl.ledger.packing import pack_json
from openclaw_rl.ledger.schema import FILE, connect, migrate
from openclaw_rl.ledger.status import Status, plural, read_status
from openclaw_rl.terminal import console, progress
from openclaw_rl.types import BASE_VERSION

#: How long to wait for a server on this machine to say how it is.
PROBE_SECONDS = 2.0
#: Another writer may hold the ledger for a moment.
LOCK_SECONDS = 10
#: So much SQLite writes anew in about a second, for which a server's requests can wait.
QUICKLY_WRITTEN = 256 << 20
#: Batches that were set aside, the last ones, in the table of `status`.
SHOWN_BATCHES = 5
#: Sessions that are named where what was given fits several.
SHOWN_IDS = 5


@contextlib.contextmanager
def opened(config: Config, *, create: bool = False) -> Iterator[sqlite3.Connection]:
    """The run's ledger, to read and change. Raises UserError if there is none."""
    path = config.ledger_dir / FILE
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.is_file():
        raise no_ledger(config)
    db = connect(path)
    try:
        db.execute(f"PRAGMA busy_timeout = {LOCK_SECONDS * 1000}")
        migrate(db)
        yield db
    except sqlite3.Error as error:
        raise UserError(f"The ledger in {config.ledger_dir} cannot be used at the moment: {error}.") from None
    finally:
        db.close()


def no_ledger(config: Config) -> UserError:
    return UserError(f"There is no ledger in {config.ledger_dir.absolute()}. Has a server run with this --run-dir?")


def check_run(config: Config) -> None:
    """Raise UserError unless a server has been in the run directory, or something was imported."""
    files = (config.ledger_dir / FILE, config.run_dir.expanduser() / lock.FILE)
    if not any(path.is_file() for path in files):
        raise no_ledger(config)


def status(config: Config, options: argparse.Namespace) -> int:
    server = read_server(config.run_dir.expanduser()).get("url")
    check_run(config)
    told = ask_ready(server) if server else {}
    saved = newest_saved(config)
    if (config.ledger_dir / FILE).is_file():
        with opened(config) as db:
            found = read_status(db, server, told, saved)
    else:
        found = read_status(None, server, told, saved)
    if options.json:
        sys.stdout.write(json.dumps(found.as_json(), indent=2) + "\n")
    else:
        show_status(config, found)
    return 0


def newest_saved(config: Config) -> int:
    """The policy version of the newest checkpoint."""
    from openclaw_rl.learn.build import run_checkpoints

    return max((checkpoint.version for checkpoint in run_checkpoints(config).all()), default=BASE_VERSION)


def ask_ready(server: str) -> dict[str, Any]:
    """What a running server says about itself; nothing if it cannot be understood."""
    try:
        told = json.loads(ask(f"{server}/readyz"))
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def ask(url: str) -> bytes:
    """What is answered there, also with a status that says "not ready"; never by way of a proxy."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=PROBE_SECONDS) as answer:
            return bytes(answer.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.read()


def show_status(config: Config, found: Status) -> None:
    counts = found.counts
    table = Table()
    for state in counts.states:
        # A word a line, so that the table fits into 80 columns.
        table.add_column(state.replace("_", "\n"), justify="right")
    table.add_row(*(str(count) for count in counts.states.values()))
    out = console()
    show_titled(out, f"Turns in {config.ledger_dir}", table)
    for reason, count in counts.dropped.items():
        out.print(f"  dropped {count} × {reason}", style="dim")
    out.print(f"step {counts.step}, policy version {found.version}, server: {found.server or 'not running'}")
    out.print(Text.assemble(("Why no update? ", "bold"), found.why_no_update))
    for batch in found.quarantined[:SHOWN_BATCHES]:
        turns = ", ".join(map(str, batch.turns))
        out.print(Text(f"  set aside at step {batch.step}: turns {turns}: {batch.reason}", style="yellow"))
    if found.trouble:
        out.print(Text.assemble(("Judging: ", "bold yellow"), found.trouble))


def show_titled(out: Console, title: str, table: Table) -> None:
    """The title on a line of its own, because a folder in it is to be copied: as rich's it would be wrapped."""
    out.print(Text(title, style="table.title"), soft_wrap=True)
    out.print(table)


def checkpoints(config: Config, options: argparse.Namespace) -> int:
    from openclaw_rl.learn.build import run_checkpoints

    saved = run_checkpoints(config)
    found = saved.all()
    if not found:
        check_run(config)
        when = "one is made every --save-interval steps and when the server stops"
        console().print(Text(f"No checkpoint in {saved.folder} yet: {when}."), soft_wrap=True)
        return 0
    table = Table("step", "policy version", "made", "steps in it", "folder")
    for item in found:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.created))
        table.add_row(str(item.step), str(item.version), when, str(len(item.batches)), Text(item.folder.name))
    show_titled(console(), f"Checkpoints in {saved.folder}", table)
    return 0


def rollback(config: Config, options: argparse.Namespace) -> int:
    from openclaw_rl.cli.rolling_back import roll_back_offline, roll_back_server, step_named

    server = read_server(config.run_dir.expanduser()).get("url")
    if server:
        version = roll_back_server(server, config, options.version)
        console().print(f"Policy {version} serves now{step_named(config, version)}, and learning goes on from it.")
    else:
        with opened(config) as db:
            version = roll_back_offline(db, config, options.version)
        of_step = step_named(config, version)
        console().print(f"The next start serves policy {version}{of_step}, and learning goes on from it.")
    return 0


def merge(config: Config, options: argparse.Namespace) -> int:
    from openclaw_rl.engines.local.merge import merge_adapter
    from openclaw_rl.models import fetch_model

    base = fetch_model(config.model_name, config.cache_dir.expanduser())
    with progress() as shown:
        merge_adapter(base, options.checkpoint, options.out, lambda parts: shown.track(parts, description="Merging"))
    console().print(Text(f"The merged model is in {options.out}"), soft_wrap=True)
    return 0


def sessions(config: Config, options: argparse.Namespace) -> int:
    with opened(config) as db:
        if options.id is None:
            list_sessions(db, queries.sessions(db))
            return 0
        for summary in queries.sessions(db, id=whole_id(db, options.id)):
            show_session(db, summary)
    return 0


def whole_id(db: sqlite3.Connection, given: str) -> str:
    """The id of a session, of which the beginning is enough where no other begins so. Raises UserError."""
    found = queries.session_ids(db, given)
    if given in found:
        return given
    if not found:
        raise UserError(f"There is no session {given}. 'openclaw-rl sessions' lists them.")
    if len(found) > 1:
        some = ", ".join(found[:SHOWN_IDS]) + (", …" if len(found) > SHOWN_IDS else "")
        raise UserError(f"{len(found)} sessions begin with {given}: {some}. Give more of the id.")
    return found[0]


def rejudge(config: Config, options: argparse.Namespace) -> int:
    from openclaw_rl.app.assembly import fetch
    from openclaw_rl.cli.rejudging import confusion, summary
    from openclaw_rl.cli.rejudging import rejudge as judge_again
    from openclaw_rl.engines.base import EngineUnavailable

    if config.judging == "none":
        raise UserError("--judge none judges nothing: choose feedback, llm or custom.")
    try:
        own = config.asks_llm and config.judge_base_url is None
        folder = fetch(config, config.teacher_model_name or config.model_name) if own else None
        with opened(config) as db:
            turns = queries.judged_turns(db)[-options.last :]
            if not turns:
                raise UserError("No turn has been judged yet, so there is nothing to compare with.")
            pairs = asyncio.run(judge_again(config, folder, db, turns))
    except EngineUnavailable as error:
        raise UserError(str(error)) from None
    out = console()
    out.print(confusion(pairs))
    out.print(summary(pairs))
    for pair in pairs if options.turns else ():
        scores = ("none" if score is None else f"{score:+g}" for score in (pair.stored, pair.again))
        out.print(f"turn {pair.turn}: {' → '.join(scores)}")
    return 0


@contextlib.contextmanager
def writable(path: Path) -> Iterator[TextIO]:
    """A file to write to. Raises UserError if it cannot be written."""
    try:
        with path.open("w", encoding="utf-8") as out:
            yield out
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None


def export(config: Config, options: argparse.Namespace) -> int:
    from openclaw_rl.ledger.trajectories import export_trajectories, export_turns

    write = export_trajectories if options.format == "trajectories" else export_turns
    count = 0
    with opened(config) as db, writable(options.file) as out, progress() as shown:
        for line in shown.track(write(db), description="Exporting", total=None):
            out.write(pack_json(line) + "\n")
            count += 1
    names = ("session", "sessions") if options.format == "trajectories" else ("turn", "turns")
    console().print(Text(f"{plural(count, *names)} written to {options.file}"), soft_wrap=True)
    return 0


def import_(config: Config, options: argparse.Namespace) -> int:
    from openclaw_rl.app.assembly import fetch
    from openclaw_rl.ledger.trajectories import import_file
    from openclaw_rl.rendering.chat import ChatRenderer

    if not options.file.is_file():
        raise UserError(f"There is no file {options.file}.")
    renderer = ChatRenderer(fetch(config, config.model_name))
    with opened(config, create=True) as db:
        result = import_file(db, options.file, renderer)
    for refused in result.errors:
        sys.stderr.write(refused + "\n")
    known = f", {plural(result.known, 'was', 'were')} there already" if result.known else ""
    bad = plural(len(result.errors), "line", "lines")
    console().print(f"{plural(result.turns, 'turn', 'turns')} imported{known}, {bad} refused")
    return 1 if result.errors else 0


def forget(config: Config, options: argparse.Namespace) -> int:
    with opened(config) as db:
        found = queries.sessions(db, id=options.session, owner=options.user)
        if not found:
            wipe(db, config)  # perhaps what could not be done the last time
            raise UserError("There is nothing of that session or user in the ledger.")
        db.execute("BEGIN IMMEDIATE")
        steps = changes.forget(db, [summary.number for summary in found])
        db.execute("COMMIT")
        remains = wipe(db, config)
        records.prune(config.run_dir.expanduser() / records.FILE, set(queries.turn_numbers(db)))
    turns = plural(sum(summary.turns for summary in found), "turn", "turns")
    out = console()
    out.print(f"Forgot {plural(len(found), 'session', 'sessions')} with {turns}.")
    used = ", ".join(map(str, steps)) if steps else "none"
    out.print(
        f"Training steps that had used them: {used}." + (" Their effect on the weights remains." if steps else "")
    )
    if remains:
        sys.stderr.write(f"Remains are still in the ledger's files, because {remains}.\n")
    return 1 if remains else 0


def wipe(db: sqlite3.Connection, config: Config) -> str:
    """Take what was deleted out of the files; why not and what to do, if that cannot be done now.

    SQLite overwrites what it deletes, but not the copies that it leaves behind when it moves rows between pages.
    """
    size = (config.ledger_dir / FILE).stat().st_size
    if size > QUICKLY_WRITTEN and read_server(config.run_dir.expanduser()):
        return "writing so large a ledger anew would keep the server from recording: run this again when it is stopped"
    db.execute("VACUUM")
    busy, _log, _checkpointed = db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return "another program reads an older state of them: run the same command again later" if busy else ""
