"""Finds out whether the log-probs that a service gives with its samples are raw.

Some services give the log-probs after temperature and truncation, and do not say so. Training needs raw ones. Scores of
given tokens are always raw, so the two are compared.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from openclaw_rl.engines.tinker.errors import CallFailed, Kind
from openclaw_rl.types import SamplingParams

log = logging.getLogger(__name__)

#: What is drawn for the comparison. At usual temperatures, a confident model has nearly the same log-probs raw and
#: processed; at this one they differ by a nat or more per token. It is the highest that servers take.
PROBE = SamplingParams(max_tokens=32, temperature=2.0)
#: Tokens from the end of a prompt that the draw continues.
PROBE_PROMPT = 64
#: Largest mean difference per token: ten times the rounding error of bfloat16.
TOLERANCE = 0.3

SHOWS_DRAWN = (
    "Tinker's log-probs of samples are not raw but those after temperature, top-p and top-k: tokens that are sampled "
    "with these settings are scored again."
)
UNKNOWN = "Whether Tinker's log-probs of samples are raw cannot be checked, so they are taken to be raw: %s"


class LogprobProbe:
    """Compares once, when it is first asked; others who ask meanwhile wait for the result."""

    def __init__(self) -> None:
        self._raw: bool | None = None
        self._checking = asyncio.Lock()

    async def passes(self, probe: Callable[[], Awaitable[tuple[Sequence[float], Sequence[float]]]]) -> bool:
        """Whether log-probs are raw. `probe` gives the log-probs that came with a draw, and the scores of its tokens.

        Raises CallFailed if the service cannot be reached; the next call then tries again.
        """
        async with self._checking:
            if self._raw is None:
                self._raw = await self._check(probe)
        return self._raw

    async def _check(self, probe: Callable[[], Awaitable[tuple[Sequence[float], Sequence[float]]]]) -> bool:
        try:
            given, scored = await probe()
        except CallFailed as error:
            if error.kind not in (Kind.BROKEN, Kind.REFUSED):
                raise
            # A server that cannot score can still serve.
            log.warning(UNKNOWN, error)
            return True
        apart = sum(abs(one - other) for one, other in zip(given, scored, strict=True)) / len(given)
        if apart > TOLERANCE:
            log.warning(SHOWS_DRAWN)
        return apart <= TOLERANCE


def is_shaped(params: SamplingParams) -> bool:
    """Whether the parameters change the distribution that is drawn from."""
    return params.temperature != 1 or params.top_p < 1 or params.top_k > 0
