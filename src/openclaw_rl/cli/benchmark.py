"""`openclaw-rl benchmark`: does an endpoint learn from being used?"""

import argparse
from pathlib import Path
from typing import Any

from openclaw_rl.cli.parser import KeepExamples, add_command, check_server_options, load_options, positive
from openclaw_rl.config.options import ConfigError
from openclaw_rl.evals.arguments import MODEL_OPTIONS, USER_KEY

DOC = "measure whether any OpenAI-compatible endpoint learns from being used, or compare two such results"
COMPARE = "compare"
EXAMPLES = """\
examples:
  what it does, in minutes, with the embedded model alone and with notes:
    openclaw-rl benchmark --baseline bare,notes --quick
  your endpoint, where two keys are two people, and the bare model, compared on
  the same questions:
    openclaw-rl benchmark --url http://host:8000 --model NAME \\
        --key ADA --key BOB --seed 7 --out runs/mine
    openclaw-rl benchmark --baseline bare --seed 7 --out runs/bare
    openclaw-rl benchmark compare runs/bare runs/mine
  go on with a run that was stopped: the same command with the --out it printed
"""


def add(commands: Any) -> None:
    parser = add_command(commands, "benchmark", DOC, run, MODEL_OPTIONS, {"seed": "one that nobody knew before"})
    parser.epilog, parser.formatter_class = EXAMPLES, KeepExamples
    parser.add_argument("--url", default="", help="the endpoint to measure, with or without /v1")
    # `dest` is not `baseline`, because that is an option of the server.
    parser.add_argument(
        "--baseline",
        dest="baselines",
        default="",
        metavar="NAMES",
        help="instead, start some of bare, history, notes, preset, team, practice, combine, topk-select; or all",
    )
    parser.add_argument(
        "--track",
        default="",
        metavar="NAMES",
        help="only some of wishes, people, sense, many, change-of-mind, two-people, forget, tools",
    )
    parser.add_argument("--quick", action="store_true", help="ask about a tenth: minutes, not an hour, on two cores")
    parser.add_argument(
        "--seeds", type=positive, default=1, metavar="N", help="measure with so many seeds (default: 1)"
    )
    parser.add_argument(
        "--at-once",
        type=positive,
        metavar="N",
        help="items measured at the same time (default: 4; 1 with baselines that train)",
    )
    parser.add_argument(
        "--quiet",
        type=float,
        metavar="SECONDS",
        help="how long `practice` may practise before each examination (default: 900; 30 with --quick)",
    )
    parser.add_argument("--out", type=Path, help="the folder of the results; one that has some is continued")
    add_endpoint_flags(parser.add_argument_group("How the endpoint is asked"))
    parser.add_argument(
        "words",
        nargs="*",
        metavar="compare A B",
        help="compare two results, each a file or a folder; options for the servers of baselines may follow --",
    )


def add_endpoint_flags(group: Any) -> None:
    group.add_argument("--model", default="", help="the name of the model to ask for")
    group.add_argument("--name", default="endpoint", help="what results call the endpoint (default: endpoint)")
    group.add_argument("--wire", choices=("chat", "responses"), default="chat", help="how to ask (default: chat)")
    group.add_argument(
        "--key",
        action="append",
        default=[],
        help="a key of the endpoint; several keys are several people (may be given several times)",
    )
    group.add_argument("--by-user", action="store_true", help="tell people apart by OpenAI's field user")
    group.add_argument(
        "--pause",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="how long to wait after each session of an endpoint (default: 0)",
    )
    group.add_argument(
        "--forget-url", default="", metavar="URL", help="where DELETE deletes all that the key's owner, or {user}, said"
    )
    group.add_argument(
        "--bare-header",
        default="",
        metavar="NAME: VALUE",
        help="the header with which the endpoint answers without what it remembers",
    )
    group.add_argument(
        "--feedback", action="store_true", help="also send the wanted answer as a correction to /v1/feedback"
    )
    group.add_argument(
        "--user-base-url", default="", help=f"let the model at this address play the people (key: {USER_KEY})"
    )
    group.add_argument("--user-model", default="", help="the name of that model")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.app.machine import machine_of
    from openclaw_rl.evals.benchmark.command import benchmark, compare

    if options.words[:1] == [COMPARE]:
        if len(options.words) != 3:
            raise ConfigError("Give two results: openclaw-rl benchmark compare A B.")
        return compare(Path(options.words[1]), Path(options.words[2]))
    options.server = options.words
    if options.server and not options.server[0].startswith("-"):
        raise ConfigError(f"Unexpected argument: {options.server[0]}. See openclaw-rl benchmark --help.")
    check_server_options(options.program, options.server)
    config = load_options(options).config
    return benchmark(machine_of(config), options, config.run.seed if "seed" in config.given() else None)
