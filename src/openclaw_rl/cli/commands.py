"""Commands about what is recorded; they work beside a server or without one."""

import argparse
import asyncio
import contextlib
import http.client
import json
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
from openclaw_rl.ledger import lock
from openclaw_rl.ledger.lock import read_server
from openclaw_rl.ledger.offline import check_ledger, open_offline
from openclaw_rl.ledger.packing import pack_json
from openclaw_rl.ledger.reader import LedgerReader
from openclaw_rl.ledger.schema import FILE
from openclaw_rl.ledger.status import Status, plural, read_status
from openclaw_rl.terminal import console, progress
from openclaw_rl.types import BASE_VERSION

#: How long to wait for a server on this machine to say how it is.
PROBE_SECONDS = 2.0
#: Batches that were set aside, the last ones, in the table of `status`.
SHOWN_BATCHES = 5
#: Sessions that are named where what was given fits several.
SHOWN_IDS = 5


def check_run(config: Config) -> None:
    """Raise UserError unless a server has been in the run directory, or something was imported."""
    if not (config.run_dir.expanduser() / lock.FILE).is_file():
        check_ledger(config.ledger_dir)


def status(config: Config, options: argparse.Namespace) -> int:
    server = read_server(config.run_dir.expanduser()).get("url")
    check_run(config)
    told = ask_ready(server) if server else {}
    saved = newest_saved(config)
    if (config.ledger_dir / FILE).is_file():
        with open_offline(config.ledger_dir) as ledger:
            found = ledger.reader.status(server, told, saved)
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
        with open_offline(config.ledger_dir) as ledger:
            version = roll_back_offline(ledger, config, options.version)
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
    with open_offline(config.ledger_dir) as ledger, ledger.reader.snapshot():
        reader = ledger.reader
        if options.id is None:
            list_sessions(reader)
            return 0
        for summary in reader.sessions(id=whole_id(reader, options.id)):
            show_session(reader, summary)
    return 0


def whole_id(reader: LedgerReader, given: str) -> str:
    """The id of a session, of which the beginning is enough where no other begins so. Raises UserError."""
    found = reader.session_ids(given)
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
        with open_offline(config.ledger_dir) as ledger:
            turns = ledger.reader.judged_turns()[-options.last :]
            if not turns:
                raise UserError("No turn has been judged yet, so there is nothing to compare with.")
            pairs = asyncio.run(judge_again(config, folder, ledger.reader, turns))
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
    with open_offline(config.ledger_dir) as ledger, writable(options.file) as out, progress() as shown:
        for line in shown.track(write(ledger.reader), description="Exporting", total=None):
            out.write(pack_json(line) + "\n")
            count += 1
    names = ("session", "sessions") if options.format == "trajectories" else ("turn", "turns")
    console().print(Text(f"{plural(count, *names)} written to {options.file}"), soft_wrap=True)
    return 0


def import_(config: Config, options: argparse.Namespace) -> int:
    from openclaw_rl.app.assembly import fetch
    from openclaw_rl.rendering.chat import ChatRenderer

    if not options.file.is_file():
        raise UserError(f"There is no file {options.file}.")
    renderer = ChatRenderer(fetch(config, config.model_name))
    with open_offline(config.ledger_dir, create=True) as ledger:
        result = ledger.import_file(options.file, renderer)
    for refused in result.errors:
        sys.stderr.write(refused + "\n")
    known = f", {plural(result.known, 'was', 'were')} there already" if result.known else ""
    bad = plural(len(result.errors), "line", "lines")
    console().print(f"{plural(result.turns, 'turn', 'turns')} imported{known}, {bad} refused")
    return 1 if result.errors else 0


def forget(config: Config, options: argparse.Namespace) -> int:
    run_dir = config.run_dir.expanduser()
    with open_offline(config.ledger_dir) as ledger:
        found = ledger.reader.sessions(id=options.session, owner=options.user)
        beside_server = bool(read_server(run_dir))
        if not found:
            ledger.wipe(beside_server=beside_server)  # an earlier command may have been unable to
            raise UserError("There is nothing of that session or user in the ledger.")
        steps = ledger.forget(found)
        remains = ledger.wipe(beside_server=beside_server)
        records.prune(run_dir / records.FILE, set(ledger.reader.turn_numbers()))
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
