"""Turns from a file were sampled by nobody: the policy of the moment says how likely it finds them, then they count.

Their log-probs are the policy's own at that moment, so a first step on them begins at a ratio of one.
"""

import asyncio
import contextlib
import logging

from openclaw_rl.engines.base import EngineError, EngineUnavailable, Sampler
from openclaw_rl.ledger.errors import LedgerError, UnknownTurn
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.types import ScoreRequest

log = logging.getLogger(__name__)

#: An import is another program's work, of which this one hears only by looking.
LOOK_SECONDS = 5.0


async def score_imported(ledger: Ledger, sampler: Sampler, top: int = 0) -> None:
    """Score turns that wait for it, until cancelled; `top` of the policy's likeliest tokens are recorded with them."""
    while True:
        try:
            turn = ledger.first_unscored()
            if turn is not None:
                await score_turn(ledger, sampler, turn, top)
                continue
        except EngineUnavailable as error:
            log.debug("Imported turns wait for the engine: %s", error)
        except LedgerError as error:
            log.debug("Imported turns wait for the ledger: %s", error)
        await asyncio.sleep(LOOK_SECONDS)


async def score_turn(ledger: Ledger, sampler: Sampler, number: int, top: int) -> None:
    version = sampler.newest_version
    with contextlib.suppress(UnknownTurn):
        turn = ledger.load_turn(number)
        ids = [*turn.prompt_ids, *turn.response_ids]
        request = ScoreRequest(ids, len(turn.response_ids), version=version, top_k=top)
        try:
            scores = await sampler.score(request)
        except EngineUnavailable:
            raise
        except EngineError as error:
            await ledger.drop(number, f"cannot be scored by the policy: {error}")
        else:
            await ledger.set_logprobs(number, version, scores)
