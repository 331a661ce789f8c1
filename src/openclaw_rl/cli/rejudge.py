"""`openclaw-rl rejudge`: judge stored turns again, with another judge or rubric, and compare the scores.

It changes nothing in the ledger: the table shows how good a judge is before anything is trained on its verdicts.
"""

import argparse
import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from sqlite3 import Connection
from typing import TYPE_CHECKING, Any

from rich.table import Table

from openclaw_rl.app.config import FIELDS, Config
from openclaw_rl.cli.parser import RUN_OPTIONS, add_command, positive, run_config
from openclaw_rl.config.options import ConfigError, option_of
from openclaw_rl.errors import UserError
from openclaw_rl.ledger.schema import open_ledger
from openclaw_rl.terminal import console, plural, progress

if TYPE_CHECKING:
    from openclaw_rl.judge.judges.base import TwoScores

DOC = "judge stored turns again, with another judge or rubric, and compare; nothing is changed"
SIGNS = ("good", "neutral", "bad", "abstains")


def add(commands: Any) -> None:
    judging = [name for name, field in FIELDS.items() if option_of(field).group == "Judge"]
    model = ("model_name", "trust_remote_code", "teacher_model_name", "cache_dir", "device", "seed")
    parser = add_command(commands, "rejudge", DOC, run, (*RUN_OPTIONS, *judging, *model))
    parser.usage = "openclaw-rl rejudge [options]"
    parser.add_argument(
        "--last", type=positive, default=1000, metavar="N", help="only the last N turns (default: 1000)"
    )
    parser.add_argument("--turns", action="store_true", help="also list every turn with both scores")


def run(options: argparse.Namespace) -> int:
    from openclaw_rl.engines.base import EngineUnavailable
    from openclaw_rl.ledger.turns import judged_turns

    config = run_config(options)
    if config.judge.kind == "none":
        raise ConfigError("--judge none judges nothing: choose feedback, llm or custom.")
    try:
        with open_ledger(config.ledger_dir) as db:
            turns = judged_turns(db)[-options.last :]
            if not turns:
                raise UserError("No turn has been judged yet, so there is nothing to compare with.")
            pairs = asyncio.run(judge_turns(config, db, turns))
    except EngineUnavailable as error:
        raise UserError(str(error)) from None
    out = console()
    out.print(confusion(pairs))
    out.print(summary(pairs))
    for pair in pairs if options.turns else ():
        scores = ("none" if score is None else f"{score:+g}" for score in (pair.stored, pair.new))
        out.print(f"turn {pair.turn}: {' → '.join(scores)}")
    return 0


async def judge_turns(config: Config, db: Connection, turns: Sequence[int]) -> "list[TwoScores]":
    """Judge turns again, several at once, with a progress bar. Damaged ones are left out."""
    from openclaw_rl.app.assembly import fetch_files, judge_setup, start_model
    from openclaw_rl.engines.factory import Resources
    from openclaw_rl.judge.build import build_panel
    from openclaw_rl.judge.judges.base import rejudge
    from openclaw_rl.ledger.turns import load_readable

    async with contextlib.AsyncExitStack() as stack:
        model = None
        if config.asks_llm and config.judge.judge_base_url is None:
            name = config.model.teacher_model_name or config.policy_name
            folder = fetch_files(config, name)
            sampler = config.sampler.open(config.engine_settings, Resources(stack), folder, name)
            model = await start_model(stack, sampler, folder)
        panel = build_panel(judge_setup(config), model, explicit=False)
        limit = asyncio.Semaphore(config.judge.num_judge_workers)
        with progress() as shown:
            task = shown.add_task("Judging", total=len(turns))

            async def one(number: int) -> "TwoScores | None":
                async with limit:
                    turn = load_readable(db, number)
                    pair = await rejudge(panel, turn) if turn else None
                shown.advance(task)
                return pair

            return [pair for pair in await asyncio.gather(*map(one, turns)) if pair]


def sign(score: float | None) -> str:
    return "abstains" if score is None else "good" if score > 0 else "bad" if score < 0 else "neutral"


def confusion(pairs: "Sequence[TwoScores]") -> Table:
    """How often each stored verdict became which new one."""
    counts = Counter((sign(pair.stored), sign(pair.new)) for pair in pairs)
    headings = ("stored", *(f"now {name}" for name in SIGNS))
    table = Table(*headings, title="Stored verdicts and new ones", title_justify="left")
    for before in SIGNS:
        table.add_row(before, *(str(counts[before, after] or "") for after in SIGNS))
    return table


def summary(pairs: "Sequence[TwoScores]") -> str:
    """How often both scores agree, where there are two."""
    both = [pair for pair in pairs if pair.stored is not None and pair.new is not None]
    same = sum(sign(pair.stored) == sign(pair.new) for pair in both)
    share = f" ({same / len(both):.0%})" if both else ""
    return f"{plural(len(pairs), 'turn', 'turns')}; both gave a score to {len(both)}, the same to {same}{share}."
