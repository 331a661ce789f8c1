"""What all commands share: the parser, the flags of the server's options, and how those options are loaded."""

import argparse
import difflib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from openclaw_rl.app.config import FIELDS, Config, Loaded, check_values, load, load_for_run
from openclaw_rl.config.options import ConfigError, add_flags, flag, option_of
from openclaw_rl.types import SHARED

#: Where a run is: the options of every command about a run.
RUN_OPTIONS = ("run_dir", "rl_buffer_dir")
#: The keys with which a command asks the server of a run.
KEY_OPTIONS = ("api_key", "admin_key")
SECRETS = {name: option_of(field) for name, field in FIELDS.items() if option_of(field).secret}
SECRET_FLAGS = list(map(flag, SECRETS))
#: The variables with the keys of other servers that sample: no flag gives them, so that no list of processes has them.
ENGINE_KEYS = [variable for secret in SECRETS.values() if secret.group == "Engine" for variable in secret.env]

#: Arguments that are numbers: the function that reads each kind, and what it takes.
NUMBERS = {"int": "a whole number", "float": "a number", "positive": "a whole number above 0"}
#: What argparse says if one of these functions fails.
WRONG_NUMBER = re.compile(rf"argument (.+): invalid ({'|'.join(NUMBERS)}) value: (.+)")


class KeepExamples(argparse.HelpFormatter):
    """Wraps a text of one line to the terminal's width, and leaves one of several lines, such as examples, as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


class Parser(argparse.ArgumentParser):
    """Says in one sentence what is wrong with the arguments, and names the nearest flag or word. Raises ConfigError."""

    def error(self, message: str) -> NoReturn:
        if mistake := WRONG_NUMBER.fullmatch(message):
            name, kind, value = mistake.groups()
            message = f"{name} {value} is not {NUMBERS[kind]}"
        raise ConfigError(f"{message[0].upper()}{message[1:]}. See {self.prog} --help.")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            name = action.metavar if isinstance(action.metavar, str) else action.dest
            near = difflib.get_close_matches(str(value), list(action.choices), n=1)
            hint = f"; did you mean {near[0]}?" if near else f". See {self.prog} --help."
            raise ConfigError(f"There is no {name.lower()} {value!r}{hint}")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [f for action in self._actions for f in action.option_strings]
            name = unknown[0].split("=")[0]  # a secret may follow the sign
            if name == "--":
                place = "-- and what follows it must come right after the names: give other flags before them"
                raise ConfigError(f"{place}. See {self.prog} --help.")
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f"; did you mean {near[0]}?" if near else f". See {self.prog} --help."
            raise ConfigError((f"There is no option {name}" if name.startswith("-") else unexpected(name, args)) + hint)
        return known, unknown


def secret_flag(word: str) -> str | None:
    """The flag of a secret that a word is or shortens."""
    name = word.split("=")[0]
    if not name.startswith("--") or name == "--" or name in map(flag, FIELDS):
        return name if name in SECRET_FLAGS else None
    return next((secret for secret in SECRET_FLAGS if secret.startswith(name)), None)


def check_server_options(program: Parser, words: Sequence[str], otherwise: str = "") -> None:
    """Refuse what a server that is to be started would refuse, and secrets, which results would repeat.

    Whether options fit together is left to the server: a command adds some of its own. Raises ConfigError.
    """
    if secret := next(filter(None, map(secret_flag, words)), None):
        raise ConfigError(f"{secret} cannot be given after --, where it would be written to results{otherwise}.")
    check_values(given_flags(program.parse_args(["serve", *words])))


def unexpected(argument: str, arguments: Sequence[str]) -> str:
    """Names an argument that belongs to nothing, unless it may be part of a secret."""
    given = [word.split("=")[0] for word in arguments if word.startswith("--")]
    may_be_secret = any(secret.startswith(name) for secret in SECRET_FLAGS for name in given)
    return "There is an unexpected argument" if may_be_secret else f"Unexpected argument: {argument}"


def add_command(
    commands: Any,
    name: str,
    doc: str,
    run: Callable[[argparse.Namespace], int],
    options: Sequence[str],
    defaults: Mapping[str, str] | None = None,
) -> Parser:
    """Add a command that takes --config and some of the server's options, with `defaults` as for `add_flags`."""
    # A flag of the command's own may be another name of an option.
    parser: Parser = commands.add_parser(
        name, help=doc, description=f"{doc[0].upper()}{doc[1:]}.", conflict_handler="resolve"
    )
    add_config_flag(parser)
    add_flags(parser, FIELDS, only=options, defaults=defaults)
    parser.set_defaults(run=run)
    return parser


def add_line_flag(parser: Parser) -> None:
    """For commands about one line of policies."""
    parser.add_argument(
        "--line",
        default=SHARED,
        metavar="KEY-NAME",
        help=f"with --policy-per-user: whose line of policies is meant (default: {SHARED})",
    )


def add_config_flag(parser: Parser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="read options from a TOML file")


def load_options(options: argparse.Namespace) -> Loaded:
    """The server's options, from a command's flags, the environment and a file."""
    ignored = getattr(options, "no_environment", False)
    keys = {name: os.environ[name] for name in ENGINE_KEYS if name in os.environ}
    return load(given_flags(options), keys if ignored else None, options.config)


def run_config(options: argparse.Namespace) -> Config:
    """The same for a command about a run: options that the run remembers need not be given again."""
    return load_for_run(given_flags(options), options.config).config


def given_flags(options: argparse.Namespace) -> dict[str, Any]:
    """The server's options among a command's arguments."""
    return {name: value for name, value in vars(options).items() if name in FIELDS}


def positive(text: str) -> int:
    """A count of at least one, for argparse."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number
