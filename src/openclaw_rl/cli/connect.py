"""`openclaw-rl connect`: writes or prints the configuration with which a client uses the running server."""

import argparse
import re
import sys
from typing import Any

from rich.text import Text

from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, run_config
from openclaw_rl.client import GIVE_KEY, Client
from openclaw_rl.connect.clients import CLIENTS, NO_SERVER, ServerFacts, Setup
from openclaw_rl.connect.files import Change, addition, removal
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.run_dir import server_url
from openclaw_rl.terminal import agrees, console, say

DOC = "configure a client (OpenClaw, Claude Code, Codex …) for the running server"
DIFF_STYLES = {"+": "green", "-": "red", "@": "cyan"}


def add(commands: Any) -> None:
    parser = add_command(commands, "connect", DOC, run, (*RUN_OPTIONS, "api_key"))
    parser.add_argument("client", choices=CLIENTS, metavar="CLIENT", help=f"one of {', '.join(CLIENTS)}")
    parser.add_argument("--url", help="the server's URL, if it runs on another machine or in another run directory")
    parser.add_argument("--print", action="store_true", dest="only_print", help="print the settings; change no file")
    parser.add_argument("--undo", action="store_true", help="take the settings out of the client's file again")
    parser.add_argument("--yes", action="store_true", help="change the file without asking")


def run(options: argparse.Namespace) -> int:
    server = NO_SERVER if options.undo else find_server(options)
    setup = CLIENTS[options.client](server)
    if options.undo:
        if setup.path is None or setup.edit is None:
            raise UserError(f"There is nothing to undo: connect changes no file for {options.client}.")
        change = removal(setup.path, setup.edit)
        if confirmed(change, "", options.yes):
            change.revert()
            say(f"{change.path} has no settings of openclaw-rl any more.")
        return 0
    if options.only_print or setup.path is None or setup.edit is None:
        show(setup)
        return 0
    change = addition(setup.path, setup.edit)
    if not change.is_needed:
        say(f"{change.path} has these settings already.")
    elif confirmed(change, server.key, options.yes):
        change.apply()
        undo = f"openclaw-rl connect {options.client} --undo takes it back."
        console().print(
            f"{change.path} is written. {setup.then}\n{undo}", markup=False, highlight=False, soft_wrap=True
        )
    return 0


def find_server(options: argparse.Namespace) -> ServerFacts:
    """The server that clients are to use. Raises UserError if it does not run or needs another key."""
    config = run_config(options)
    url = (options.url or server_url(config.run.folder) or "").rstrip("/").removesuffix("/v1")
    if not url:
        raise UserError(
            f"No server runs in {config.run.run_dir.absolute()}: start one in another terminal, with make run or "
            "openclaw-rl serve, or give its --run-dir or --url."
        )
    key = config.server.user_key
    with Client(url, key) as client:
        model = client.model()
        if "policy_version" not in client.ready():
            raise UserError(f"The server needs a key, which clients must be told. {GIVE_KEY}")
    if re.search(r"[\ud800-\udfff]", model["id"]):
        raise UserError("The server's model has a name that is not text: start it with another --model-name.")
    return ServerFacts(url, model["id"], model["max_input_tokens"], key)


def show(setup: Setup) -> None:
    """The settings on standard output, and what they are for on standard error: so the output can be piped."""
    sys.stdout.write(setup.shown)
    sys.stdout.flush()
    where = f"These belong in {setup.path}. " if setup.path else ""
    console(stderr=True).print(f"\n{where}{setup.then}", markup=False, highlight=False, soft_wrap=True)


def confirmed(change: Change, secret: str, yes: bool) -> bool:
    """Show a change, and ask whether to make it."""
    out = console()
    for line in change.diff(secret):
        out.print(Text(line, style=DIFF_STYLES.get(line[:1], "")), soft_wrap=True)
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UserError("Nothing was changed: give --yes to change the file without being asked, or --print.")
    if agrees("Change the file?"):
        return True
    out.print("Nothing was changed.")
    return False
