"""Gives imported turns log-probs. They were not sampled here, so the current policy scores them.

A first step on them therefore starts at a probability ratio of one.
"""

import asyncio
import contextlib
import logging

from openclaw_rl.engines.base import EngineError, EngineUnavailable, Sampler
from openclaw_rl.ledger.errors import LedgerError, UnknownTurn
from openclaw_rl.ledger.groups import queue, trainable
from openclaw_rl.ledger.states import move
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import first_unscored, load_turn, set_logprobs
from openclaw_rl.types import ScoreRequest, State

log = logging.getLogger(__name__)

#: Another process imports turns, so this one has to poll for them.
POLL_SECONDS = 5.0


async def score_imported(ledger: Ledger, sampler: Sampler, batch_size: int, top: int = 0) -> None:
    """Score imported turns until cancelled, and record the policy's `top` likeliest tokens with them.

    A turn is scored only while fewer than `batch_size` turns wait to be judged or trained on. Otherwise a large file
    would be scored at once, and most of its turns would be stale before their step.
    """
    with ledger.watch() as changed:
        while True:
            changed.clear()
            try:
                turn = ledger.read(first_unscored)
                if turn is not None and ledger.read(queue).to_judge + ledger.read(trainable) < batch_size:
                    await score_turn(ledger, sampler, turn, top)
                    continue
            except (EngineUnavailable, LedgerError) as error:
                log.debug("Imported turns wait: %s", error)
                await asyncio.sleep(POLL_SECONDS)
            # Not wait_for: in Python 3.11 it may swallow a cancellation.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await changed.wait()


async def score_turn(ledger: Ledger, sampler: Sampler, number: int, top: int) -> None:
    version = sampler.newest_version
    with contextlib.suppress(UnknownTurn):
        turn = ledger.read(load_turn, number)
        ids = [*turn.prompt_ids, *turn.response_ids]
        request = ScoreRequest(ids, len(turn.response_ids), version=version, top_k=top, owner=turn.session.owner)
        try:
            scores = await sampler.score(request)
        except EngineUnavailable:
            raise
        except EngineError as error:
            await ledger.write(move, number, State.DROPPED, f"cannot be scored by the policy: {error}")
        else:
            # A teacher that was asked about the policy's likeliest tokens has to be asked again about the new ones.
            await ledger.write(set_logprobs, number, version, scores, keep_verdict=not top)
