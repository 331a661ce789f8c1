"""`openclaw-rl forget`: delete a session's or a user's data for good."""

import argparse
import sys
from typing import Any

from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.errors import UserError
from openclaw_rl.terminal import console

DOC = "delete a session's or a user's data for good, and say which updates had used it"


def add(commands: Any) -> None:
    parser = add_command(commands, "forget", DOC, run, RUN_OPTIONS)
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--session", metavar="ID", help="the session to forget")
    whose.add_argument("--user", metavar="KEY-NAME", help="the API key whose sessions to forget")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.learn import records
    from openclaw_rl.ledger.lock import read_server
    from openclaw_rl.ledger.offline import open_offline
    from openclaw_rl.ledger.status import plural

    config = run_config(options)
    run_dir = config.run.folder
    with open_offline(config.ledger_dir) as ledger:
        sessions = ledger.reader.sessions(id=options.session, owner=options.user)
        steps = ledger.forget(sessions) if sessions else []
        # Also if nothing was found: an earlier call may have deleted rows that it could not remove from the files.
        remains = ledger.wipe(beside_server=bool(read_server(run_dir)))
        if not sessions:
            raise UserError("There is nothing of that session or user in the ledger.")
        records.prune(run_dir / records.FILE, set(ledger.reader.turn_numbers()))
    out = console()
    turns = plural(sum(session.turns for session in sessions), "turn", "turns")
    out.print(f"Forgot {plural(len(sessions), 'session', 'sessions')} with {turns}.")
    used = ", ".join(map(str, steps)) if steps else "none"
    effect = " Their effect on the weights remains." if steps else ""
    out.print(f"Training steps that had used them: {used}.{effect}")
    if remains:
        sys.stderr.write(f"Remains are still in the ledger's files, because {remains}.\n")
    return 1 if remains else 0
