"""`openclaw-rl forget`: delete a session's or a user's data for good, and train again without it."""

import argparse
import sys
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from sqlite3 import Connection
from typing import Any, NamedTuple

from openclaw_rl.app.config import Config
from openclaw_rl.cli.parser import KEY_OPTIONS, RUN_OPTIONS, add_command, run_config
from openclaw_rl.cli.sessions import complete_id
from openclaw_rl.cli.status import read as read_status
from openclaw_rl.client import Client
from openclaw_rl.errors import UserError
from openclaw_rl.learn.checkpoints import Checkpoint, Policies, line_folder, lines_on_disk
from openclaw_rl.ledger.run_dir import read_server, server_url
from openclaw_rl.ledger.schema import open_ledger, transaction
from openclaw_rl.terminal import plural, say
from openclaw_rl.types import SHARED, SessionSummary

DOC = "delete a session's or a user's data for good, and say which policies were trained on it"


def add(commands: Any) -> None:
    parser = add_command(commands, "forget", DOC, run, (*RUN_OPTIONS, "keep_checkpoints", *KEY_OPTIONS))
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--session", metavar="ID", help="the session to forget; the beginning of its id is enough")
    whose.add_argument("--user", metavar="KEY-NAME", help="the API key whose sessions to forget")
    parser.add_argument(
        "--retrain",
        action="store_true",
        help="go back to the newest policy that was not trained on deleted turns, delete the policies and checkpoints "
        "that were, and train again on the turns that remain",
    )
    parser.add_argument(
        "--wipe",
        action="store_true",
        help="remove what was deleted before from the run's files, if it is still there",
    )


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.learn.rollback import finish_deletions
    from openclaw_rl.ledger import deletion, training
    from openclaw_rl.ledger.notes import forget, of_owner
    from openclaw_rl.ledger.practices import sessions_of

    if not (options.session or options.user or options.retrain or options.wipe):
        raise UserError("Give --session ID, --user KEY-NAME, --retrain or --wipe. See openclaw-rl forget --help.")
    config = run_config(options)
    run_dir = config.run.folder
    problems: list[str] = []
    with open_ledger(config.ledger_dir) as db:
        warn = partial(say_problem, problems)
        beside_server = bool(read_server(run_dir))
        if deletion.unfinished(db):
            # First: what was deleted then is no longer found below.
            finish_deletions(run_dir, db, warn, beside_server=beside_server)
            if not problems:
                say("Finished an earlier deletion.")
        sessions = choose_sessions(db, options.session, options.user)
        with transaction(db):
            training.infer_policies(db, {state.version: state.step for state in config.checkpoints.states()})
        notes = of_owner(db, options.user, all_states=True) if options.user else []
        has_line = options.user in lines_on_disk(run_dir)
        if options.user and not sessions and not notes and not has_line:
            raise UserError(f"There is nothing of the user {options.user} in the ledger.")
        turns: list[int] = []
        if sessions or notes:
            with transaction(db):
                practised = sessions_of(db, options.user) if options.user else []
                turns = deletion.delete_sessions(db, [*(session.number for session in sessions), *practised])
                if options.user:
                    forget(db, options.user)
        if sessions or notes or options.wipe:
            finish_deletions(run_dir, db, warn, beside_server=beside_server)
        if notes:
            say(f"Forgot {plural(len(notes), 'note', 'notes')}.")
        if sessions:
            say_forgotten(sessions, training.steps_with(db, turns), run_dir)
        if has_line:
            drop_line(config, db, options.user)
        if options.retrain:
            retrain(config, db)
        elif turns:
            say_where(config, db, training.versions_with(db, turns))
    return 1 if problems else 0


def say_problem(said: list[str], problem: str) -> None:
    """Say a sentence once, and at once: nobody would say it again if this program were killed."""
    if problem not in said:
        sys.stderr.write(f"{problem}\n")
        said.append(problem)


def choose_sessions(db: Connection, session: str | None, user: str | None) -> list[SessionSummary]:
    """The sessions of an id, of which the beginning is enough, or of a user. Raises UserError for an unknown id."""
    from openclaw_rl.ledger.pages import session_summaries

    if session is not None:
        return session_summaries(db, id=complete_id(db, session))
    return session_summaries(db, owner=user) if user is not None else []


def say_forgotten(sessions: Sequence[SessionSummary], steps: Sequence[int], run_dir: Path) -> None:
    from openclaw_rl.learn.rollback import reports

    turns = plural(sum(session.turns for session in sessions), "turn", "turns")
    ids = {session.key.id for session in sessions}
    name = f": {ids.pop()}" if len(ids) == 1 else ""
    say(f"Forgot {plural(len(sessions), 'session', 'sessions')} with {turns}{name}.")
    say(f"Training steps that had used them: {', '.join(map(str, steps)) or 'none'}.")
    for report in reports(run_dir):
        say(f"{report} may quote them: write it again, or delete it.")


def drop_line(config: Config, db: Connection, line: str) -> None:
    """Delete a person's line, with the server running or without it. What only it has learned is gone then."""
    from openclaw_rl.learn.rollback import drop_line_offline

    if server := server_url(config.run.folder):
        with Client(server, config.server.operator_key) as client:
            client.drop_line(line)
    if line_folder(config.run.folder, line).exists():
        # There is no server, or one that does not learn in lines.
        drop_line_offline(db, config.run.folder, line)
        if server:
            say("Start the server again: until then it may serve what was deleted.")
    say(f"Deleted the line {line}, with all that only it had learned.")


class LineTraces(NamedTuple):
    """What a line has on disk of some policy versions."""

    line: str
    checkpoints: list[Checkpoint]
    policies: list[Path]


def traces_of(config: Config, versions: Collection[int]) -> list[LineTraces]:
    """What is on disk of these policy versions, of the lines that have some."""
    from openclaw_rl.learn.rollback import find_traces

    found = []
    for line in (SHARED, *lines_on_disk(config.run.folder)):
        policies = Policies.of_run(line_folder(config.run.folder, line))
        traces = find_traces(versions, config.checkpoints_of(line), policies)
        if traces:
            found.append(LineTraces(line, traces.checkpoints, list(map(policies.folder_of, traces.policies))))
    return found


def say_where(config: Config, db: Connection, versions: Collection[int]) -> None:
    """Say which of these policy versions serve or are on disk, and what can be done about it."""
    from openclaw_rl.learn.rollback import newest_without
    from openclaw_rl.ledger.training import policy_line

    traces = traces_of(config, versions)
    serving = read_status(config).version
    if serving not in versions and not traces:
        if versions:
            say("Neither the policy that serves nor any on disk was trained on them.")
        return
    say("These were trained on them, and still have what they taught:")
    if serving in versions:
        say(f"  policy {serving}, which serves")
    for found in traces:
        for folder in (*(checkpoint.folder for checkpoint in found.checkpoints), *found.policies):
            say(f"  {folder}")
    if serving in versions:
        clean = newest_without(versions, config.checkpoints.all(), policy_line(db, serving))
        number = clean.version if clean else 0
        say(f"To serve a policy from before them: openclaw-rl rollback {number}")
    again = "To delete all of these, and train again on the turns that remain: openclaw-rl forget --retrain"
    say(again)


def retrain(config: Config, db: Connection) -> None:
    """Train again without the turns that were deleted, with the server running or without it."""
    from openclaw_rl.learn.rollback import retrain_offline
    from openclaw_rl.ledger.groups import trainable
    from openclaw_rl.ledger.training import versions_with_deleted_turns

    versions = versions_with_deleted_turns(db)
    traces = traces_of(config, versions)
    if read_status(config).version not in versions and not traces:
        say("No policy was trained on deleted turns: there is nothing to train again.")
        return
    if server := server_url(config.run.folder):
        with Client(server, config.server.operator_key) as client:
            version = client.roll_back(None, retrain=True)
    else:
        made = {}
        for line in (SHARED, *(found.line for found in traces if found.line != SHARED)):
            policies = Policies.of_run(line_folder(config.run.folder, line))
            made[line] = retrain_offline(db, config.checkpoints_of(line), policies, line)
        version = made[SHARED]
    left = traces_of(config, versions_with_deleted_turns(db))
    if left:
        paths = [path for found in left for path in (*(c.folder for c in found.checkpoints), *found.policies)]
        names = ", ".join(map(str, paths))
        raise UserError(f"These could not be deleted, and were trained on deleted turns: {names}. Delete them by hand.")
    checkpoints = plural(sum(len(found.checkpoints) for found in traces), "checkpoint", "checkpoints")
    folders = plural(sum(len(found.policies) for found in traces), "policy", "policies")
    say(f"Deleted {checkpoints} and {folders} that were trained on deleted turns.")
    when = "The server now serves" if server else "The next start serves"
    waiting = plural(trainable(db), "turn waits", "turns wait")
    say(f"{when} policy {version}, which was not. {waiting} to be trained on.")
