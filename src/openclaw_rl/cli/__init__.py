"""The command line: `openclaw-rl COMMAND …`. Heavy parts are imported by the command that needs them."""

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from openclaw_rl import __version__
from openclaw_rl.app.config import Config, Loaded, load
from openclaw_rl.app.run_options import load_for_run
from openclaw_rl.app.startup_signals import Start
from openclaw_rl.config.options import ConfigError, add_flags, option_of
from openclaw_rl.errors import UserError
from openclaw_rl.evals.flags import add_demo_options, add_eval_options

EPILOG = """\
examples:
  openclaw-rl serve                                  the embedded model on this machine
  openclaw-rl serve --model-name ./my-model          a model folder of yours (or a Hub id, or a GGUF file)
  openclaw-rl serve --api-key alice=S3CRET           open to the network, for those who have the key
  openclaw-rl serve --config server.toml --dry-run   check a configuration and show where each value is from

Each option can also be set by the environment variable in brackets, or in the --config file.
"""

#: Exit status for "you asked for something that cannot be done", as argparse uses it.
USAGE_ERROR = 2
#: That of a program which Ctrl-C ended, as shells give it.
INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, with the nearest flag there is."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message[0].upper()}{message[1:]}. See {self.prog} --help.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [f for action in self._actions for f in action.option_strings]
            name = unknown[0].split("=")[0]  # what follows may be a secret
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f"; did you mean {near[0]}?" if near else f". See {self.prog} --help."
            what = f"There is no option {name}" if name.startswith("-") else "There is a word too many after an option"
            raise ConfigError(what + hint)
        return known, unknown


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        options = build_parser().parse_args(arguments)
        run = options.run
        return int(run(options))
    except UserError as error:
        print(f"openclaw-rl: {error}", file=sys.stderr)  # noqa: T201
        return USAGE_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED


def build_parser() -> Parser:
    parser = Parser(
        prog="openclaw-rl",
        description="An OpenAI-compatible server for a model you own, which learns from being used.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"openclaw-rl {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    serve = commands.add_parser(
        "serve",
        usage="openclaw-rl serve [options]",
        help="serve a model through an OpenAI-compatible API",
        description="Serve a model through an OpenAI-compatible API.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    serve.add_argument(
        "--dry-run",
        action="store_true",
        help="check options, files and folders, show the configuration, and exit; the port is not tried",
    )
    serve.add_argument("--config", type=Path, metavar="FILE.toml", help="read options from a TOML file")
    add_flags(serve, Config)
    serve.set_defaults(run=run_serve)
    add_evals(commands)
    add_ledger_commands(commands)
    return parser


def add_evals(commands: Any) -> None:
    """The commands that show what is learned."""

    def add(name: str, doc: str, run: Callable[[argparse.Namespace], int]) -> Any:
        parser = commands.add_parser(name, help=doc, description=f"{doc[0].upper()}{doc[1:]}.")
        parser.add_argument("--config", type=Path, metavar="FILE.toml", help="read options from a TOML file")
        add_flags(parser, Config, only=("model_name", "cache_dir", "device", "seed"))
        parser.set_defaults(run=run)
        return parser

    demo = "watch simulated people teach the model what they like, and get a picture of it"
    add_demo_options(add("demo", demo, run_demo))
    add_eval_options(add("eval", "measure what a model can do: conversation, coding, tool use", run_eval))


def add_ledger_commands(commands: Any) -> None:
    """The commands about what is recorded; all take --run-dir."""

    def add(name: str, doc: str, *options: str) -> Parser:
        parser: Parser = commands.add_parser(name, help=doc, description=f"{doc[0].upper()}{doc[1:]}.")
        parser.add_argument("--config", type=Path, metavar="FILE.toml", help="read options from a TOML file")
        add_flags(parser, Config, only=("run_dir", "rl_buffer_dir", *options))
        parser.set_defaults(run=run_ledger_command, command=name)
        return parser

    add("chat", "talk to the running server, which learns from what you say", "api_key")
    status = add("status", "show how many turns are where, and why nothing has been trained yet")
    status.add_argument("--json", action="store_true", help="for programs")
    sessions = add("sessions", "list sessions, or show one in full")
    sessions.add_argument("id", nargs="?", metavar="ID", help="the session to show; the beginning of its id is enough")
    export = add("export", "write what is recorded to a file")
    export.add_argument("file", type=Path, metavar="OUT.jsonl")
    export.add_argument(
        "--format",
        choices=("trajectories", "jsonl"),
        default="trajectories",
        help="a session a line in words, or a turn a line with tokens and log-probs",
    )
    imports = add("import", "read sessions from a trajectories file", "model_name", "cache_dir")
    imports.add_argument("file", type=Path, metavar="IN.jsonl")
    judging = [name for name, field in Config.model_fields.items() if option_of(field).group == "Judge"]
    rejudge = add(
        "rejudge",
        "judge stored turns again, with another judge or rubric, and compare; nothing is changed",
        *judging,
        *("model_name", "teacher_model_name", "cache_dir", "device", "seed"),
    )
    rejudge.add_argument("--last", type=positive, default=1000, metavar="N", help="only the last N (default: 1000)")
    rejudge.add_argument("--turns", action="store_true", help="also list every turn with both scores")
    add("checkpoints", "list the checkpoints of a run")
    rollback = add("rollback", "serve an earlier policy, and learn on from it", "keep_checkpoints", "api_key")
    rollback.add_argument(
        "version",
        nargs="?",
        type=int,
        metavar="VERSION",
        help="a policy version that has a checkpoint, or 0 for the base model (default: the checkpoint before)",
    )
    merge = add("merge", "write a model with an adapter merged into its weights", "model_name", "cache_dir")
    merge.add_argument("checkpoint", type=Path, metavar="CKPT", help="a checkpoint, or any PEFT folder of this model")
    merge.add_argument("out", type=Path, metavar="OUT", help="a new folder")
    report = add(
        "report",
        "write a page about a run: curves, verdicts, turns token by token, answers before and after",
        *("model_name", "cache_dir", "device", "dtype", "method"),
    )
    report.add_argument("run_dir", nargs="?", default=argparse.SUPPRESS, metavar="RUN_DIR", help="the run's directory")
    report.add_argument("--out", type=Path, metavar="FILE.html", help="where to (default: RUN_DIR/report.html)")
    report.add_argument("--no-answers", action="store_true", help="load no model: no answers before and after")
    forget = add("forget", "delete a session's or a user's data for good, and say which updates had used it")
    whose = forget.add_mutually_exclusive_group(required=True)
    whose.add_argument("--session", metavar="ID", help="the session to forget")
    whose.add_argument("--user", metavar="KEY-NAME", help="the API key whose sessions to forget")


def positive(text: str) -> int:
    """A number of things, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def run_ledger_command(options: argparse.Namespace) -> int:
    from openclaw_rl.cli import commands
    from openclaw_rl.cli.chat import chat
    from openclaw_rl.cli.report import report

    config = load_for_run(flags_of(options), options.config).config
    run = {
        "chat": chat,
        "status": commands.status,
        "sessions": commands.sessions,
        "export": commands.export,
        "import": commands.import_,
        "forget": commands.forget,
        "rejudge": commands.rejudge,
        "checkpoints": commands.checkpoints,
        "rollback": commands.rollback,
        "merge": commands.merge,
        "report": report,
    }[options.command]
    return run(config, options)


def run_demo(options: argparse.Namespace) -> int:
    from openclaw_rl.evals.demo import demo

    return demo(load_options(options).config, options)


def run_eval(options: argparse.Namespace) -> int:
    from openclaw_rl.evals.evaluate import evaluate

    return evaluate(load_options(options).config, options)


def run_serve(options: argparse.Namespace) -> int:
    loaded = load_options(options)
    start = Start()
    try:
        from openclaw_rl.app import server

        if options.dry_run:
            server.check(loaded.config)
            show(loaded)
        else:
            server.serve(loaded.config, start)
    except KeyboardInterrupt:
        when = "what was learned last was saved" if start.is_over else "it was ready"
        print(f"openclaw-rl: Stopped before {when}.", file=sys.stderr)  # noqa: T201
    return 0


def load_options(options: argparse.Namespace) -> Loaded:
    """The configuration that a command's flags, the environment and a file make together."""
    return load(flags_of(options), file=options.config)


def flags_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options of the server among a command's."""
    return {name: value for name, value in vars(options).items() if name in Config.model_fields}


def show(loaded: Loaded) -> None:
    """Print every option with its value and where that came from."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("option", "value", "from", title="Configuration", title_justify="left")
    for name, value, origin in loaded.describe():
        style = None if origin.startswith("default") else "bold"
        table.add_row(name, escape(value), escape(origin), style=style)
    # Piped into a file, the table keeps its columns whole rather than cut to 80 characters.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
