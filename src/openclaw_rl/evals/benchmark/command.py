"""`openclaw-rl benchmark`: measure endpoints and baselines, and compare results."""

import argparse
import os
import secrets
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from openclaw_rl import terminal
from openclaw_rl.config.options import ConfigError
from openclaw_rl.evals.arguments import USER_KEY, Machine
from openclaw_rl.evals.benchmark.results import (
    compared,
    comparison_table,
    load_results,
    results_table,
    write_results,
)
from openclaw_rl.evals.benchmark.run import FIXED, BenchmarkPlan, head_of, items_of
from openclaw_rl.evals.benchmark.systems import BASELINES, BaselineSystem, EndpointSystem, System
from openclaw_rl.evals.benchmark.tracks import TRACKS
from openclaw_rl.evals.chat import Chat
from openclaw_rl.evals.items import ItemGroup, left_in_words, run_items
from openclaw_rl.evals.result_log import ResultLog
from openclaw_rl.lab.commands import RunProgress, new_folder

#: Where results are written without `--out`.
DEFAULT_OUT = Path("runs/benchmark")
#: Items that are measured at the same time.
AT_ONCE = 4
#: A seed that is chosen for a run lies below this.
SEEDS = 1_000_000


def benchmark(machine: Machine, options: argparse.Namespace, seed: int | None) -> int:
    """Measure an endpoint or baselines, from this seed on; without one, from a seed that nobody knew before."""
    console = terminal.console()
    tracks = chosen(options.track, TRACKS, "track")
    if bool(options.user_base_url) != bool(options.user_model):
        raise ConfigError("--user-base-url and --user-model must be given together, or neither.")
    if bool(options.url) == bool(options.baselines):
        raise ConfigError("Give either --url, the address of an endpoint, or --baseline.")
    if options.url and options.server:
        raise ConfigError("Options after -- are for the servers of baselines: an endpoint at --url runs already.")
    given = "" if options.baselines == "all" else options.baselines
    baselines = [] if options.url else chosen(given, BASELINES, "baseline")
    out = options.out or new_folder(DEFAULT_OUT)
    player = None
    if options.user_base_url:
        player = Chat(options.user_base_url, model=options.user_model, key=os.environ.get(USER_KEY, ""))
    teaching = {"player": player, "feedback": options.feedback}
    first = kept_seed(out) if seed is None else seed
    # A server that trains needs the machine for itself. Any other answers several people at once.
    at_once = options.at_once or (1 if any(BASELINES[name].trains for name in baselines) else AT_ONCE)
    groups: list[ItemGroup[None]] = []
    for number in range(first, first + options.seeds):
        plan = BenchmarkPlan(tracks, number, options.quick, options.quiet)
        for system in systems(machine, options, baselines, out, number, teaching):
            log = ResultLog(out / f"{system.name}-{number}.jsonl", head_of(system, plan), FIXED, ("track", "item"))
            groups.append(items_of(system, plan, log))
            at_once = 1 if system.one_at_a_time else at_once
    items = sum(len(group.left) for group in groups)
    console.print(f"Seed {first}: {left_in_words(items, 'item', 'items', out)}", soft_wrap=True)
    run_items(groups, at_once, RunProgress(console, "items", items), partial(show, out, console), player)
    return 0


def show(out: Path, console: Console) -> None:
    """Show and write what is done."""
    if results := [one for one in load_results(out) if one.lines]:
        write_results(results, out)
        console.print(results_table(results))
        pages = f"Table: {out / 'results.md'}   Picture: {out / 'scores.svg'}   Page: {out / 'index.html'}"
        console.print(pages, soft_wrap=True)


def kept_seed(out: Path) -> int:
    """The lowest seed of the results in a folder; in a new one, a random seed."""
    if out.is_dir() and any(out.glob("*.jsonl")):
        return min(int(one.head["seed"]) for one in load_results(out))
    return secrets.randbelow(SEEDS)


def chosen(given: str, known: Collection[str], what: str) -> list[str]:
    """Some of the known names, separated by commas, in their order; all if none is given. Raises ConfigError."""
    names = [name.strip() for name in given.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"There is no {what} {unknown[0]}: --{what} takes some of {', '.join(known)}.")
    return [name for name in known if name in names or not names]


def systems(
    machine: Machine,
    options: argparse.Namespace,
    baselines: Sequence[str],
    out: Path,
    seed: int,
    teaching: dict[str, Any],
) -> Iterator[System]:
    """What is measured with a seed: these baselines, or the endpoint of the options. Raises ConfigError."""
    if options.url:
        keys = [key for given in options.key for key in given.split(",")]
        yield EndpointSystem(
            options.url,
            tuple(keys) or ("",),
            options.model,
            options.wire,
            options.by_user,
            options.pause,
            options.forget_url,
            bare_headers(options.bare_header),
            teaching,
            options.name,
        )
        return
    machine.fetch_model()
    for name in baselines:
        folder = out / "servers" / f"{name}-{seed}"
        yield BaselineSystem(name, machine, folder, teaching, ("--seed", str(seed), *options.server), options.wire)


def bare_headers(given: str) -> dict[str, str] | None:
    """The header NAME: VALUE, if one is given. Raises ConfigError."""
    name, sign, value = given.partition(":")
    if given and not (name.strip() and sign):
        raise ConfigError(f"--bare-header {given} is not NAME: VALUE.")
    return {name.strip(): value.strip()} if given else None


def compare(first: Path, second: Path) -> int:
    """Show how much more the second passes than the first, on the cases that both were asked."""
    one, other = load_results(first), load_results(second)
    title = f"{named(other)} minus {named(one)}, on the same cases (95 % interval)"
    terminal.print_titled(terminal.console(), title, comparison_table(compared(one, other)))
    return 0


def named(results: Sequence[Any]) -> str:
    return ", ".join(dict.fromkeys(one.system for one in results))
