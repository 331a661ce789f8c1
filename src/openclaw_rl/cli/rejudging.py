"""Judging stored turns again, with another judge or rubric, beside what was said of them: `openclaw-rl rejudge`.

Nothing is changed in the ledger: the table shows what a judge is worth before anything is trained on its word.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.table import Table

from openclaw_rl.app.assembly import open_backend, start_model
from openclaw_rl.app.config import Config
from openclaw_rl.errors import UserError
from openclaw_rl.judge.build import build_panel
from openclaw_rl.judge.case import Case
from openclaw_rl.judge.circuit_breaker import FIRST_PAUSE
from openclaw_rl.judge.errors import JudgeDown, JudgeError
from openclaw_rl.judge.judges import Panel
from openclaw_rl.ledger.reader import LedgerReader
from openclaw_rl.ledger.status import plural
from openclaw_rl.terminal import progress
from openclaw_rl.types import Question, StoredTurn

#: Seconds that a judge may be away before the command gives up.
PATIENCE = 20.0
SIGNS = ("good", "neutral", "bad", "abstains")


@dataclass(frozen=True, slots=True)
class Pair:
    """A turn, judged twice."""

    turn: int
    stored: float | None
    again: float | None


def sign(score: float | None) -> str:
    return "abstains" if score is None else "good" if score > 0 else "bad" if score < 0 else "neutral"


async def rejudge(config: Config, folder: Path | None, reader: LedgerReader, turns: Sequence[int]) -> list[Pair]:
    """Score turns again; `folder` is the model that judges, if one on the backend does."""
    async with contextlib.AsyncExitStack() as stack:
        model = None
        if folder is not None:
            judge = config.model_copy(update={"model_name": config.teacher_model_name or config.model_name})
            model = await start_model(stack, open_backend(stack, judge, folder).sampler, folder)
        # What people said of a turn is what a judge is measured by, not what it is told.
        panel = build_panel(config, model, explicit=False)
        limit = asyncio.Semaphore(config.num_judge_workers)
        with progress() as shown:
            task = shown.add_task("Judging", total=len(turns))

            async def one(turn: int) -> Pair:
                async with limit:
                    pair = await judge_again(panel, reader.turn(turn))
                shown.advance(task)
                return pair

            return list(await asyncio.gather(*(one(turn) for turn in turns)))


async def judge_again(panel: Panel, turn: StoredTurn) -> Pair:
    """Raises UserError if the judge stays away: a table of turns that it never saw would say nothing."""
    stored = turn.verdict.score if turn.verdict else None
    patience = PATIENCE
    while True:
        try:
            verdict = await panel.verdict(replace(Case.of(turn), feedback=()), frozenset([Question.SCORE]))
            return Pair(turn.number, stored, verdict.score)
        except JudgeDown as error:
            if patience <= 0:
                raise UserError(f"The judge cannot be asked: {error}.") from None
            pause = max(FIRST_PAUSE, error.retry_after)
            patience -= pause
            await asyncio.sleep(pause)
        except (JudgeError, TimeoutError):
            return Pair(turn.number, stored, None)


def confusion(pairs: Sequence[Pair]) -> Table:
    """How often which verdict became which."""
    counts = Counter((sign(pair.stored), sign(pair.again)) for pair in pairs)
    table = Table(
        "stored", *(f"now {name}" for name in SIGNS), title="Stored verdicts and new ones", title_justify="left"
    )
    for before in SIGNS:
        table.add_row(before, *(str(counts[before, after] or "") for after in SIGNS))
    return table


def summary(pairs: Sequence[Pair]) -> str:
    """Agreement where both gave a score, in a sentence."""
    both = [pair for pair in pairs if pair.stored is not None and pair.again is not None]
    same = sum(sign(pair.stored) == sign(pair.again) for pair in both)
    share = f" ({same / len(both):.0%})" if both else ""
    return f"{plural(len(pairs), 'turn', 'turns')}; both gave a score to {len(both)}, the same to {same}{share}."
