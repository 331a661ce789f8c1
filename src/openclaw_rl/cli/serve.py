"""`openclaw-rl serve`: run the server, or check and show its configuration."""

import argparse
import os
import shlex
import signal
import sys
import threading
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from openclaw_rl.app.config import FIELDS, Config, Loaded
from openclaw_rl.cli.parser import KeepExamples, Parser, add_config_flag, load_options
from openclaw_rl.config.options import add_flags

#: What comes on standard input is ignored, so many bytes at a time.
IGNORED_BYTES = 4096
EPILOG = """\
examples:
  the embedded model on this machine:
    openclaw-rl serve
  a model folder of yours, a Hub id or a GGUF file:
    openclaw-rl serve --model-name ./my-model
  open to the network, for those who have the key:
    openclaw-rl serve --api-key alice=S3CRET
  check a configuration, and show where each value is from:
    openclaw-rl serve --config server.toml --dry-run

Each option can also be set by the environment variable in brackets, or in the
--config file.
"""


def add(commands: Any) -> None:
    parser: Parser = commands.add_parser(
        "serve",
        usage="openclaw-rl serve [options]",
        help="serve a model through an OpenAI-compatible API",
        description="Serve a model through an OpenAI-compatible API.",
        epilog=EPILOG,
        formatter_class=KeepExamples,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check options, files and names of models, show the configuration, and exit; the port is not tried",
    )
    parser.add_argument(
        "--no-environment",
        action="store_true",
        help="ignore environment variables, but for the keys of engines: options come from flags and --config",
    )
    parser.add_argument(
        "--stop-with-input",
        action="store_true",
        help="stop in order when standard input closes, for a program that starts a server and may be killed",
    )
    add_config_flag(parser)
    add_flags(parser, FIELDS)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.app.startup_signals import Start

    loaded = load_options(options)
    start = Start()
    try:
        if options.dry_run:
            from openclaw_rl.app.checks import check

            check(loaded.config)
            show(loaded)
        else:
            from openclaw_rl.app.server import serve

            if options.stop_with_input:
                threading.Thread(target=stop_with_input, name="input", daemon=True).start()
            serve(loaded.config, start)
    except KeyboardInterrupt:
        when = "the last training was saved" if start.is_over else "it was ready"
        print(f"openclaw-rl: Stopped before {when}.", file=sys.stderr)  # noqa: T201
    return 0


def stop_with_input() -> None:
    """Wait until standard input is closed, then stop this process in order."""
    # Not through Python's buffer: its lock would be held when the process ends, which Python ends with an abort.
    while os.read(sys.stdin.fileno(), IGNORED_BYTES):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def show(loaded: Loaded) -> None:
    """Print every option with its value and the value's origin, and what a start would run and download.

    Raises ModelNotFound if the Hub does not have what a start would download.
    """
    from openclaw_rl.app.hub import check_downloads

    downloads = check_downloads(loaded.config)
    table = Table("option", "value", "from", title="Configuration", title_justify="left")
    for name, value, origin in loaded.describe():
        style = None if origin.startswith("default") else "bold"
        table.add_row(name, escape(value), escape(origin), style=style)
    # Piped into a file, the table keeps its columns whole instead of being cut to 80 characters.
    console = Console() if sys.stdout.isatty() else Console(width=200)
    console.print(table)
    config = loaded.config
    console.print(split_table(config))
    for sentence in downloads:
        console.print(escape(sentence), soft_wrap=True)
    for command in config.sampler.start_commands(config.engine_settings):
        console.print("It would start:", escape(shlex.join(command)), soft_wrap=True)
    if config.learns and (line := config.trainer_command):
        console.print("The trainer is started with:", escape(line), soft_wrap=True)
    settings = config.engine_settings
    for note in dict.fromkeys(filter(None, (config.sampler.notes(settings), config.learner.notes(settings)))):
        console.print(escape(note), soft_wrap=True)
    console.print("Nothing is wrong with this configuration. Nothing was started.")


def split_table(config: Config) -> Table:
    """Which process runs on which GPUs, and the memory that it needs at least on each of them."""
    from openclaw_rl.app.split import gib, parts_of
    from openclaw_rl.engines.local.options import LocalOptions
    from openclaw_rl.engines.memory import Memory

    columns = ("role", "process", "GPUs", *Memory().parts, "sum")
    table = Table(*columns, title="GPUs, and GiB on each, activations aside", title_justify="left")
    on_ray = config.section(LocalOptions).on_ray
    for part in parts_of(config):
        memory = part.memory
        sizes = [*memory.parts.values(), memory.total] if memory else []
        chosen = f"{len(part.devices)}, chosen by Ray" if on_ray else ", ".join(map(str, part.devices))
        devices = chosen if part.devices else "not chosen"
        table.add_row(part.role, escape(part.process), devices, *(gib(size) if size else "" for size in sizes))
    return table
