"""`openclaw-rl rollout`: run episodes of an environment, which reward whole runs of an agent."""

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from openclaw_rl.app.config import Config, shown
from openclaw_rl.cli.parser import add_command, check_server_options, load_options, positive
from openclaw_rl.config.options import ConfigError, add_flags, flag, problem, read, shown_default
from openclaw_rl.envs.options import FIELDS, DriverOptions
from openclaw_rl.evals.arguments import MODEL_OPTIONS
from openclaw_rl.lab.commands import new_folder
from openclaw_rl.ledger.run_dir import server_url
from openclaw_rl.terminal import console, say

if TYPE_CHECKING:
    from openclaw_rl.envs.rollout import Target

DOC = "run episodes of an environment, and let the server learn from their rewards"
#: The method of a server that this command starts: it learns from rewards alone.
METHOD = "rl"
#: Options of the server that are also this command's.
SERVER_OPTIONS = ("run_dir", *MODEL_OPTIONS, "method", "api_key")
#: Options of the server that only count if this command starts it.
ONLY_FOR_STARTED_SERVER = ("method", "model_name", "device")


def add(commands: Any) -> None:
    parser = add_command(commands, "rollout", DOC, run, SERVER_OPTIONS, {"method": METHOD})
    parser.usage = "openclaw-rl rollout [options] [-- OPTIONS ...]"
    add_flags(parser, FIELDS)
    parser.add_argument(
        "--env-arg",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an argument of the environment, as JSON or as text; may be given several times",
    )
    parser.add_argument("--url", default="", help="a running server (default: the one in --run-dir, or start one)")
    parser.add_argument("--own-server", action="store_true", help="start a server, even if one runs in --run-dir")
    parser.add_argument(
        "--measure", type=positive, default=0, metavar="N", help="also attempt N held-out tasks, before and after"
    )
    parser.add_argument("--json", type=Path, metavar="OUT.jsonl", help="also append a line with all numbers to a file")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check options, files and the environment, show all that is read, and exit",
    )
    parser.add_argument("server", nargs="*", metavar="-- OPTIONS", help="further options for a server that it starts")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.envs.registry import make_source
    from openclaw_rl.envs.rollout import rollout

    config = load_options(options).config
    driver, origins = driver_options(options)
    settings = {**dict(map(setting, options.env_arg)), **environment_settings(driver)}
    # First, because it fails at once if something is wrong with it.
    source = make_source(driver, settings, measures=bool(options.measure))
    server = target(config, options)
    if not options.dry_run:
        return rollout(source, driver, server, config.run.seed, options.measure, options.json)
    asyncio.run(source.close())
    show(driver, origins, settings, source.about)
    if server.url:
        say(f"The server at {server.facts['url']} would be used.")
        return 0
    started = options.program.parse_args(["serve", "--dry-run", *server.arguments])
    return int(started.run(started))


def show(driver: DriverOptions, origins: Mapping[str, str], settings: Mapping[str, Any], about: str) -> None:
    """Print all that the driver and its environment read, with the origin of each value."""
    from openclaw_rl.cli.launchers.variables import READ_BY_ENVIRONMENTS

    table = Table("option", "value", "from", title="Episodes", title_justify="left")
    for name, field in FIELDS.items():
        value = getattr(driver, name)
        said = shown_default(field) if value == field.default else shown(value)
        table.add_row(flag(name), escape(said), escape(origins[name]))
    for name, value in settings.items():
        if name not in FIELDS:
            table.add_row(f"--env-arg {name}", escape(str(value)), "flag")
    for variable, (script, _meaning) in READ_BY_ENVIRONMENTS.items():
        if script == f"run_{driver.env}_rl":
            table.add_row(variable, escape(os.environ.get(variable, "")), f"environment {variable}")
    out = console() if sys.stdout.isatty() else Console(width=200)
    out.print(table)
    if about:
        say(f"{driver.env}: {about}")


def environment_settings(driver: DriverOptions) -> dict[str, Any]:
    """The options that were given for the environment; one that does not take them refuses them."""
    offered = driver.model_dump(include={"tools_config", "sandbox", "unsafe_no_sandbox"}, exclude_defaults=True)
    return dict(offered)


def setting(given: str) -> tuple[str, Any]:
    """NAME=VALUE; a value that is not JSON is text. Raises ConfigError."""
    name, sign, text = given.partition("=")
    if not sign or not name:
        raise ConfigError(f"--env-arg {given} is not NAME=VALUE.")
    try:
        return name.replace("-", "_"), json.loads(text)
    except ValueError:
        return name.replace("-", "_"), text


def driver_options(options: argparse.Namespace) -> tuple[DriverOptions, dict[str, str]]:
    """The driver's own options, from flags and the environment, and the origin of each. Raises ConfigError."""
    flags = {name: value for name, value in vars(options).items() if name in FIELDS}
    values, origins = read(FIELDS, flags, os.environ, {}, None)
    try:
        return DriverOptions(**values), origins
    except ValidationError as error:
        raise problem(error, FIELDS, origins) from None


def target(config: Config, options: argparse.Namespace) -> "Target":
    """The server that answers. Raises ConfigError."""
    from openclaw_rl.app.machine import machine_of
    from openclaw_rl.envs.rollout import DEFAULT_RUN_DIR, SERVER_FLAGS, Target
    from openclaw_rl.http_client import text_without_accounts, url_without_account

    check_server_options(options.program, options.server, ": start that server with openclaw-rl serve, and give --url")
    if options.url and options.own_server:
        raise ConfigError("--url and --own-server exclude each other.")
    url = options.url or ("" if options.own_server else server_url(config.run.folder) or "")
    if url:
        if useless := [flag(name) for name in ONLY_FOR_STARTED_SERVER if name in vars(options)] + options.server:
            raise ConfigError(
                f"{useless[0]} is for a server that this command starts, but {url_without_account(url)} is used: stop "
                "that server, or add --own-server."
            )
        return Target(url, config.server.user_key, facts={"url": url_without_account(url)})
    method = config.method.method if "method" in config.given() else METHOD
    machine = machine_of(config)
    run_dir = config.run.folder if "run_dir" in config.given() else DEFAULT_RUN_DIR
    if not options.dry_run:
        machine.fetch_model()
        run_dir = run_dir if "run_dir" in config.given() else new_folder(DEFAULT_RUN_DIR)
    named = ("--model-name", machine.model_name) if machine.model_name else ()
    fixed = ("--method", method, "--seed", str(machine.seed))
    return Target(
        run_dir=run_dir,
        flags=(*machine.flags, *SERVER_FLAGS, *fixed, *named, *options.server),
        facts={
            "method": method,
            "model": machine.policy_name,
            "server": list(map(text_without_accounts, options.server)),
        },
    )
