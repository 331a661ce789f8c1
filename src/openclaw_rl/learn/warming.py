"""Before a new policy serves, it reads the conversations that are under way, so that nobody waits for it to.

What an engine remembers of a prompt belongs to one policy: without this, the first request of every conversation after
a swap would be read from its beginning.
"""

import contextlib

from openclaw_rl.engines.base import EngineError, Sampler
from openclaw_rl.ledger.ledger import Ledger
from openclaw_rl.types import Priority, SampleRequest, SamplingParams

#: The last ones, and no more tokens in all than are read in a few seconds on a CPU.
CONVERSATIONS = 8
TOKENS = 4096


async def warm(ledger: Ledger, sampler: Sampler, version: int) -> None:
    """Let a policy version read the last conversations, behind everybody else; what cannot be read is left out."""
    left = min(TOKENS, sampler.limits.max_context_tokens - 1)
    for turn in ledger.open_conversations(CONVERSATIONS):
        tokens = ledger.sequence(turn)
        if len(tokens) > left:
            continue
        left -= len(tokens)
        request = SampleRequest(tokens, SamplingParams(max_tokens=1), version=version, priority=Priority.BACKGROUND)
        with contextlib.suppress(EngineError):
            async for _ in sampler.sample(request):
                pass
