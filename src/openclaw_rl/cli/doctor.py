"""`openclaw-rl doctor`: looks for what keeps a server from working, and says how to mend it."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from openclaw_rl.app.config import FIELDS
from openclaw_rl.cli.parser import Parser, add_config_flag, run_config
from openclaw_rl.config.options import add_flags
from openclaw_rl.terminal import console

if TYPE_CHECKING:
    from openclaw_rl.app.doctor import Finding

DOC = "check machine, model, disk, ports, keys, ledger, server and clients, and say what to mend"
STYLES = {"ok": "green", "note": "yellow", "broken": "bold red"}


def add(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "doctor",
        usage="openclaw-rl doctor [options]",
        help=DOC,
        description=f"{DOC[0].upper()}{DOC[1:]}. Takes the options of serve. Exit status 1: something is broken.",
    )
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_config_flag(parser)
    add_flags(parser, FIELDS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.app.doctor import Health, examine

    findings = dict(examine(run_config(options)))
    if options.json:
        told = {name: {"health": f.health, "text": f.text, "mend": f.mend} for name, f in findings.items()}
        sys.stdout.write(json.dumps(told, indent=2) + "\n")
    else:
        show(findings)
    return int(any(finding.health is Health.BROKEN for finding in findings.values()))


def show(findings: dict[str, "Finding"]) -> None:
    table = Table("check", "", "finding", "how to mend it")
    for column in table.columns:
        # Users copy paths from here, so a long path is wrapped, never cut.
        column.overflow = "fold"
    for name, finding in findings.items():
        table.add_row(name, Text(finding.health, style=STYLES[finding.health]), Text(finding.text), Text(finding.mend))
    console().print(table)
