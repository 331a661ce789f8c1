"""`openclaw-rl completion`: prints a script with which a shell completes commands and flags."""

import argparse
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import Any

DOC = "print a script that lets bash, zsh or fish complete commands and flags"
BASH = """\
# Add to ~/.bashrc: source <(openclaw-rl completion bash)
_openclaw_rl() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD-1]}} words=
  if (( COMP_CWORD == 1 )); then
    words={commands}
  else
    case "${{COMP_WORDS[1]}} $previous" in
{values}
      *) case "${{COMP_WORDS[1]}}" in
{flags}
         esac ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _openclaw_rl openclaw-rl
"""
ZSH = "# Add to ~/.zshrc: source <(openclaw-rl completion zsh)\nautoload -U +X bashcompinit && bashcompinit\n"
FISH = "# Write to ~/.config/fish/completions/openclaw-rl.fish\n"

Parsers = Mapping[str, argparse.ArgumentParser]


def add(commands: Any) -> None:
    parser = commands.add_parser("completion", help=DOC, description=f"{DOC[0].upper()}{DOC[1:]}.")
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    # The script has what the parsers have, and those of other commands may be added later than this one.
    parser.set_defaults(run=lambda options: write(options.shell, commands.choices, helps(commands)))


def helps(commands: Any) -> dict[str, str]:
    """What each command does, in words."""
    return {choice.dest: choice.help for choice in commands._choices_actions}


def write(shell: str, parsers: Parsers, about: Mapping[str, str]) -> int:
    if shell == "fish":
        sys.stdout.write(FISH + "".join(f"{line}\n" for line in fish_lines(parsers, about)))
    else:
        sys.stdout.write((ZSH if shell == "zsh" else "") + bash_script(parsers))
    return 0


def bash_script(parsers: Parsers) -> str:
    values = []
    flags = []
    for name, parser in parsers.items():
        flags.append(f"           {name}) words={words(flag for a in parser._actions for flag in a.option_strings)} ;;")
        for action in parser._actions:
            if choices := choices_of(action):
                keys = " | ".join(shlex.quote(f"{name} {flag}") for flag in action.option_strings or ("",))
                # An argument without a flag follows the command itself.
                keys = keys if action.option_strings else shlex.quote(f"{name} {name}")
                values.append(f"      {keys}) words={words(choices)} ;;")
    return BASH.format(commands=words(parsers), values="\n".join(values), flags="\n".join(flags))


def words(names: Any) -> str:
    return shlex.quote(" ".join(names))


def fish_lines(parsers: Parsers, about: Mapping[str, str]) -> Iterator[str]:
    for name, parser in parsers.items():
        yield f"complete -c openclaw-rl -n __fish_use_subcommand -f -a {name} -d {shlex.quote(about[name])}"
        condition = f"'__fish_seen_subcommand_from {name}'"
        for action in parser._actions:
            choices = choices_of(action)
            values = f" -x -a {words(choices)}" if choices else ""
            longs = [flag for flag in action.option_strings if flag.startswith("--")]
            if longs:
                names = " ".join(f"-l {flag.removeprefix('--')}" for flag in longs)
                yield f"complete -c openclaw-rl -n {condition} {names}{values}"
            elif choices:
                yield f"complete -c openclaw-rl -n {condition} -f -a {words(choices)}"


def choices_of(action: argparse.Action) -> tuple[str, ...]:
    """The values that an argument can have, if they are few and known."""
    if action.choices is not None:
        return tuple(map(str, action.choices))
    # The flags of options show their values like this.
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return tuple(metavar.split("|")) if "|" in metavar else ()
