"""What a server says when it is ready."""

import shlex
from collections.abc import Mapping

from rich.markup import escape
from rich.table import Table

from openclaw_rl.app.config import LOOPBACK, Config
from openclaw_rl.judge.build import describe
from openclaw_rl.learn.build import run_checkpoints
from openclaw_rl.terminal import console, on_terminal
from openclaw_rl.types import BASE_VERSION


def local_url(config: Config, port: int) -> str:
    """Where the server is reached from this machine."""
    host = LOOPBACK if config.host == "0.0.0.0" else config.host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def learning(config: Config) -> str:
    """What is learned, and when."""
    if not config.learns:
        return "off" if config.max_steps else "off (--max-steps 0)"
    what = {
        "rl": "scores",
        "opd": "hindsight hints",
        "combine": "scores and hindsight hints",
        "topk-select": "scores and the best of several hindsight hints, for the likeliest tokens",
    }[config.method]
    trained = f"an adapter of rank {config.lora_rank}" if config.lora_rank else "all weights"
    how = f"{trained}, a step every {config.batch_size} judged turns"
    return f"{config.method}: from {what}; {how}, in {config.run_dir}"


def beginning(config: Config, version: int) -> str:
    """Where the policy that serves first comes from: whether what was learned before has been kept."""
    if version == BASE_VERSION:
        return "the model as it is"
    for checkpoint in run_checkpoints(config).all():
        if checkpoint.version == version:
            return f"goes on from step {checkpoint.step} (policy {version}, checkpoint {checkpoint.folder.name})"
    # Another run's checkpoint has a number of its own here.
    return f"goes on from {config.resume_from_ckpt} (policy {version})"


def banner(config: Config, backend: str, version: int, port: int) -> None:
    """What a newcomer needs to know, and a line to try."""
    url = local_url(config, port) + "/v1"
    keys = config.api_keys
    reach = (
        f"listening on {config.host}, key needed ({', '.join(key.name for key in keys)})"
        if keys
        else ("no key, so only this machine can connect; --api-key opens it to the network")
    )
    rows = {
        "URL": url,
        "model": f"{config.model_label}  ({config.policy_name})",
        "backend": backend,
        "policy": beginning(config, version),
        "learning": learning(config),
        "judge": describe(config) if config.capture else "none: turns are not recorded",
        "turns": f"recorded in {config.ledger_dir}" if config.capture else "not recorded (--no-capture)",
        "access": reach,
    }
    out = console(stderr=True)
    out.print("\n[bold]openclaw-rl[/bold] is ready")
    if on_terminal(stderr=True):
        out.print(table(rows))
    else:
        plain = "\n".join(f"{label:<10}{value}" for label, value in rows.items())
        out.print(plain, markup=False, highlight=False, soft_wrap=True)
    where = "" if config.run_dir == Config().run_dir else f" --run-dir {shlex.quote(str(config.run_dir))}"
    out.print(
        f"\nTry it, in another terminal:\n  openclaw-rl chat{where}", markup=False, highlight=False, soft_wrap=True
    )
    key = ' -H "Authorization: Bearer YOUR_KEY"' if keys else ""
    example = '{"messages": [{"role": "user", "content": "Hello! Who are you?"}], "stream": true}'
    line = f"  curl -N {url}/chat/completions{key} -H 'Content-Type: application/json' -d '{example}'\n"
    out.print(line, markup=False, highlight=False, soft_wrap=True)


def table(rows: Mapping[str, str]) -> Table:
    """Names and what they stand for, wrapped to the terminal."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    # Paths are to be copied, so that none may be cut short.
    grid.add_column(overflow="fold")
    for label, value in rows.items():
        grid.add_row(f"[cyan]{label}[/cyan]", escape(value))
    return grid
