"""`openclaw-rl status`: how many turns are in each state, and what the next step is waiting for."""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from openclaw_rl.app.config import Config
from openclaw_rl.cli.parser import KEY_OPTIONS, RUN_OPTIONS, add_command, run_config
from openclaw_rl.client import ready_state
from openclaw_rl.config.general import describe_preset
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.errors import NoLedger
from openclaw_rl.ledger.run_dir import server_url, was_served
from openclaw_rl.ledger.schema import open_ledger, snapshot
from openclaw_rl.terminal import console, plural, print_titled, say
from openclaw_rl.types import BASE_VERSION, NoteState

if TYPE_CHECKING:
    from openclaw_rl.ledger.status import Status

DOC = "show how many turns are in each state, and what the next step is waiting for"
#: How many of the batches that were set aside are shown, the last ones first.
MAX_BATCHES_SHOWN = 5
MAX_LINES_SHOWN = 20


def add(commands: Any) -> None:
    parser = add_command(commands, "status", DOC, run, (*RUN_OPTIONS, *KEY_OPTIONS))
    parser.add_argument("--json", action="store_true", help="print the status as JSON")
    parser.add_argument("--line", metavar="KEY-NAME", help="show only this line of policies, of those that people have")


def run(options: argparse.Namespace) -> int:
    config = run_config(options)
    status = read(config)
    if options.line is not None:
        status = replace(status, lines=[line for line in status.lines if line["line"] == options.line])
        if not status.lines:
            raise UserError(f"The running server has no line {options.line!r}.")
    if options.json:
        sys.stdout.write(json.dumps(status.as_json(), indent=2) + "\n")
    else:
        show(config, status)
    return 0


def read(config: Config) -> "Status":
    """From the ledger, the checkpoints and the running server. Raises UserError where no server has ever run."""
    from openclaw_rl.learn.guard import FILE, GuardState
    from openclaw_rl.ledger.status import read_status

    run_dir = config.run.folder
    server = server_url(run_dir)
    ready = ready_state(server, config.server.operator_key) if server else {}
    guard = GuardState.read(run_dir / FILE).as_json()
    saved = max((checkpoint.version for checkpoint in config.checkpoints.states()), default=BASE_VERSION)
    try:
        with open_ledger(config.ledger_dir) as db, snapshot(db):
            return read_status(db, server, ready, saved, guard)
    except NoLedger:
        if not was_served(run_dir):
            raise
        return read_status(None, server, ready, saved, guard)


def show(config: Config, status: "Status") -> None:
    from openclaw_rl.ledger.status import REMEMBERS

    counts = status.counts
    table = Table()
    for state in counts.states:
        # One word per line, so that the table fits into 80 columns.
        table.add_column(state.replace("_", "\n"), justify="right")
    table.add_row(*(str(count) for count in counts.states.values()))
    out = console()
    print_titled(out, f"Turns in {config.ledger_dir}", table)
    for reason, count in counts.dropped.items():
        out.print(Text(f"  dropped {count} × {reason}", style="dim"))
    out.print(f"step {counts.step}, policy version {status.version}, server: {status.server or 'not running'}")
    if status.silent:
        text = f"  This is from the ledger alone: {status.silent}."
        say(text, "yellow")
    for part, where in status.runs.items():
        say(f"  {part}: {where}", "dim")
    if config.learns and status.learner != REMEMBERS:
        out.print(Text.assemble(("Settings: ", "bold"), describe_preset(config.run.preset)), soft_wrap=True)
    if any(status.notes.values()):
        out.print(Text.assemble(("Notes: ", "bold"), notes_line(status)))
    if status.practice:
        goes_on = "" if status.server else " It goes on when the server runs."
        said = f"note {status.practice.note} {status.practice.words}.{goes_on}"
        out.print(Text.assemble(("Practice: ", "bold"), said), soft_wrap=True)
    out.print(Text.assemble(("The next step: ", "bold"), status.waiting_for))
    for line in status.lines[:MAX_LINES_SHOWN]:
        out.print(Text.assemble((f"{line['line']}: ", "bold"), line_words(line)), soft_wrap=True)
    if len(status.lines) > MAX_LINES_SHOWN:
        out.print(f"and {len(status.lines) - MAX_LINES_SHOWN} more lines (--line KEY-NAME shows one).")
    if status.guard:
        out.print(Text.assemble(("Guard: ", "bold"), status.guard["in_words"]), soft_wrap=True)
    for batch in status.quarantined[:MAX_BATCHES_SHOWN]:
        turns = ", ".join(map(str, batch.turns))
        out.print(Text(f"  set aside at step {batch.step}: turns {turns}: {batch.reason}", style="yellow"))
    if status.trouble:
        out.print(Text.assemble(("Judging: ", "bold yellow"), status.trouble))
    if status.unread:
        out.print(Text.assemble(("Not understood: ", "bold yellow"), status.unread))


def line_words(line: Mapping[str, Any]) -> str:
    """Where a line of policies stands."""
    step = "" if line["step"] is None else f", step {line['step']}"
    waits = f"{line['samples']} of {line['needed']} judged turns for its next step"
    return f"policy {line['policy_version']}{step}, {waits}. {line['trouble'] or line['guard']}".rstrip()


def notes_line(status: "Status") -> str:
    active = status.notes[NoteState.ACTIVE]
    retired = status.notes[NoteState.RETIRED]
    learned = f", and {retired} retired because the policy does without" if retired else ""
    return f"{plural(active, 'note is', 'notes are')} given to the model{learned}. 'openclaw-rl notes' lists them."
