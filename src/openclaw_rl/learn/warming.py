"""Warms a new policy's prefix cache with the open conversations before it serves.

Cached prefixes belong to one policy version and one owner. Without a warm-up, the first request of every conversation
after a swap would be prefilled from its beginning.
"""

import contextlib

from openclaw_rl.engines.base import EngineError, Sampler
from openclaw_rl.ledger.store import Ledger
from openclaw_rl.ledger.turns import open_conversations
from openclaw_rl.types import Priority, SampleRequest, SamplingParams

#: How many conversations are warmed, and how many tokens in all: a few seconds of work on a CPU.
MAX_CONVERSATIONS = 8
MAX_TOKENS = 4096


async def warm(ledger: Ledger, sampler: Sampler, version: int) -> None:
    """Prefill the latest conversations as background work. Skip those that are too long or that fail."""
    left = min(MAX_TOKENS, sampler.limits.max_context_tokens - 1)
    for turn, owner in ledger.read(open_conversations, MAX_CONVERSATIONS):
        tokens = ledger.sequence(turn)
        if len(tokens) > left:
            continue
        left -= len(tokens)
        params, background = SamplingParams(max_tokens=1), Priority.BACKGROUND
        request = SampleRequest(tokens, params, version=version, priority=background, owner=owner)
        with contextlib.suppress(EngineError):
            async for _ in sampler.sample(request):
                pass
