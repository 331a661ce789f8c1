"""What a server shows on its terminal: the progress towards the next step, and a banner when it is ready."""

import asyncio
import contextlib
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from openclaw_rl.api.options import ALL_ADDRESSES, LOOPBACK, ServerOptions
from openclaw_rl.app.assembly import judge_setup
from openclaw_rl.app.config import Config
from openclaw_rl.app.larger_model import in_words, larger_model
from openclaw_rl.config.general import RunOptions, describe_preset
from openclaw_rl.engines.outside.factory import LOST
from openclaw_rl.judge.build import describe
from openclaw_rl.learn.lines import Lines
from openclaw_rl.learn.loop import LearnLoop
from openclaw_rl.learn.outside import OutsideTraining
from openclaw_rl.ledger.errors import LedgerError
from openclaw_rl.ledger.status import REMEMBERS
from openclaw_rl.terminal import console, on_terminal
from openclaw_rl.types import BASE_VERSION

REFRESH_SECONDS = 0.5
COLUMNS = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.completed}/{task.total}"))


async def show_learning(learning: LearnLoop | Lines | OutsideTraining, console: Console) -> None:
    """Keep the line up to date until cancelled; the log scrolls above it."""
    with Progress(*COLUMNS, TimeElapsedColumn(), console=console, transient=True) as progress:
        line = progress.add_task("", total=learning.settings.batch_size)
        shown = ""
        while True:
            with contextlib.suppress(LedgerError):
                if state := learning.progress():
                    what = f"{'training' if state.training else 'samples for'} step {state.step}"
                    if what != shown:
                        progress.reset(line)
                        shown = what
                    progress.update(
                        line, description=what, completed=min(state.samples, state.needed), total=state.needed
                    )
            await asyncio.sleep(REFRESH_SECONDS)


class TurnsBar:
    """Shows how many turns are done. The log scrolls above it; without a terminal nothing is shown."""

    def __init__(self, console: Console) -> None:
        self.progress = Progress(
            *COLUMNS, TimeElapsedColumn(), console=console, transient=True, disable=not console.is_terminal
        )
        self._task = self.progress.add_task("", total=0)

    def show(self, text: str, done: int, total: int) -> None:
        self.progress.update(self._task, description=text, completed=done, total=total)


#: What is said of the embedded model.
FOR_TRYING = ", for trying the loop; for work, give a larger one with --model-name"


def local_url(options: ServerOptions, port: int) -> str:
    """The server's URL on this machine."""
    host = LOOPBACK if options.host == ALL_ADDRESSES else options.host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def learning(config: Config) -> str:
    """How the server learns."""
    if config.engine.takes_text:
        return REMEMBERS
    if not config.learns:
        return "off" if config.training.max_steps else "off (--max-steps 0)"
    method = config.learning_method
    model = config.model
    if config.engine.trains_outside:
        return (
            f"{method.name}: from {method.learns_from}; {config.learner.name} trains outside and claims judged turns "
            f"here ({LOST}); recorded in {config.run.run_dir}"
        )
    trained = "all weights" if model.full_weights else f"an adapter of rank {model.lora_rank}"
    how = f"{trained}, a step every {config.training.batch_size} judged turns"
    return f"{method.name}: from {method.learns_from}; {how}, in {config.run.run_dir}"


def judging(config: Config) -> str:
    """What judges turns."""
    if not config.capture.capture:
        return "none: turns are not recorded"
    if config.engine.takes_text:
        return describe(judge_setup(config), "the API itself", "--judge llm asks the API, --judge-base-url another")
    without = "the embedded model is too small to judge (--judge-base-url names another)"
    return describe(judge_setup(config), config.model.teacher_model_name, without)


def beginning(config: Config, version: int) -> str:
    """Where the first policy that serves comes from."""
    if config.engine.trains_outside:
        return f"what the servers hold, as policy {version}"
    if version == BASE_VERSION:
        return "the model as it is"
    for checkpoint in config.checkpoints.all():
        if checkpoint.version == version:
            return f"continues from step {checkpoint.step} (policy {version}, checkpoint {checkpoint.folder.name})"
    if config.training.resume_from_ckpt == "auto":
        return f"continues with policy {version}, which served last"
    # A checkpoint of another run: this run has given it a new version number.
    return f"continues from {config.training.resume_from_ckpt} (policy {version})"


def in_both_names(config: Config) -> str:
    """The model by the name that clients use, and by its own if that is another."""
    served, own = config.served_name, config.policy_name
    return served if served == own else f"{served}  ({own})"


def page(config: Config, port: int) -> str:
    """Where the live page is."""
    return f"open {local_url(config.server, port)}/ in a browser" if config.server.dashboard else "off (--no-dashboard)"


def banner(config: Config, backend: str, version: int, port: int, unread: str = "", learner: str = "") -> None:
    """Print the server's settings, commands to try it with, and what the rules did not understand so far."""
    url = local_url(config.server, port) + "/v1"
    keys = config.server.api_keys
    captures = config.capture.capture
    reach = (
        f"listening on {config.server.host}, key needed ({', '.join(key.name for key in keys)})"
        if keys
        else "no key, so only this machine can connect; --api-key opens it to the network"
    )
    rows = {
        "URL": url,
        "page": page(config, port),
        "model": in_both_names(config) + (FOR_TRYING if config.embedded else ""),
        **({"larger": in_words(config, fit)} if (fit := larger_model(config)) else {}),
        "backend": backend,
        **({"learner": learner} if learner else {}),
        **({} if config.engine.takes_text else {"policy": beginning(config, version)}),
        "learning": learning(config),
        **({"settings": describe_preset(config.run.preset)} if config.learns else {}),
        "judge": judging(config),
        "notes": "what users ask for is given to the model from their next conversation on (/notes in chat)"
        if captures and config.notes.notes
        else "off",
        "turns": f"recorded in {config.ledger_dir}" if captures else "not recorded (--no-capture)",
        "access": reach,
    }
    out = console(stderr=True)
    out.print("\n[bold]openclaw-rl[/bold] is ready")
    if on_terminal(stderr=True):
        out.print(table(rows))
    else:
        lines = "\n".join(f"{label:<10}{value}" for label, value in rows.items())
        out.print(lines, markup=False, highlight=False, soft_wrap=True)
    if unread:
        out.print(f"\n{unread}", markup=False, highlight=False, soft_wrap=True)
    out.print(
        f"\nTry it, in another terminal:\n  {chat_command(config)}", markup=False, highlight=False, soft_wrap=True
    )
    key = ' -H "Authorization: Bearer YOUR_KEY"' if keys else ""
    example = '{"messages": [{"role": "user", "content": "Hello! Who are you?"}], "stream": true}'
    line = f"  curl -N {url}/chat/completions{key} -H 'Content-Type: application/json' -d '{example}'\n"
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def chat_command(config: Config) -> str:
    """The command line that talks to this server, from any folder and without an activated environment."""
    folder = Path.cwd()
    program = Path(sys.executable).with_name("openclaw-rl")
    shown = program.relative_to(folder) if program.is_relative_to(folder) else program
    words = [str(shown)] if program.exists() else [sys.executable, "-m", "openclaw_rl"]
    run_dir = config.run.run_dir
    where = [] if run_dir == RunOptions().run_dir else ["--run-dir", str(run_dir)]
    key = ["--api-key", "YOUR_KEY"] if config.server.api_keys else []
    return f"cd {shlex.quote(str(folder))} && {shlex.join([*words, 'chat', *where, *key])}"


def table(rows: Mapping[str, str]) -> Table:
    """Labels and values, wrapped to the width of the terminal."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    # Users copy paths from here, so a long path is wrapped, never cut.
    grid.add_column(overflow="fold")
    for label, value in rows.items():
        grid.add_row(f"[cyan]{label}[/cyan]", escape(value))
    return grid
