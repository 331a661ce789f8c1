"""Whether the log-probs that a service gives with its samples are the policy's own.

Services differ in it and do not say: some give those of the distribution that was drawn from, after temperature and
truncation. What a policy is trained on must be raw, as the scores of given tokens are, so the two are compared.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from openclaw_rl.engines.tinker.errors import CallFailed, Kind
from openclaw_rl.types import SamplingParams

log = logging.getLogger(__name__)

#: What is drawn for the comparison. At the temperatures that users ask for, a model that is sure of itself says nearly
#: the same raw or not; at this one they are a nat or more a token apart, and it is the highest that servers take.
PROBE = SamplingParams(max_tokens=32, temperature=2.0)
#: So many of a prompt's last tokens are enough to go on from.
PROBE_PROMPT = 64
#: How far apart they may be, in the mean over the tokens: ten times what bfloat16 does to the same numbers.
TOLERANCE = 0.3

SHOWS_DRAWN = (
    "Tinker's log-probs of samples are not the model's own but those after temperature, top-p and top-k: what is "
    "sampled with these is scored again."
)
UNKNOWN = "Whether Tinker's log-probs of samples are the model's own cannot be checked, so they are taken as such: %s"


class LogprobProbe:
    """Settles the question once, when it is first asked; others who ask meanwhile wait for the answer."""

    def __init__(self) -> None:
        self._raw: bool | None = None
        self._checking = asyncio.Lock()

    async def passes(self, probe: Callable[[], Awaitable[tuple[Sequence[float], Sequence[float]]]]) -> bool:
        """Whether log-probs are raw. `probe` gives those that came with the tokens of a draw, and their scores.

        Raises CallFailed if the service is not there; it is then looked at another time.
        """
        async with self._checking:
            if self._raw is None:
                self._raw = await self._check(probe)
        return self._raw

    async def _check(self, probe: Callable[[], Awaitable[tuple[Sequence[float], Sequence[float]]]]) -> bool:
        try:
            told, scored = await probe()
        except CallFailed as error:
            if error.kind not in (Kind.BROKEN, Kind.REFUSED):
                raise
            # A server that cannot score can still serve.
            log.warning(UNKNOWN, error)
            return True
        apart = sum(abs(one - other) for one, other in zip(told, scored, strict=True)) / len(told)
        if apart > TOLERANCE:
            log.warning(SHOWS_DRAWN)
        return apart <= TOLERANCE


def is_shaped(params: SamplingParams) -> bool:
    """Whether it is not the raw distribution that is drawn from."""
    return params.temperature != 1 or params.top_p < 1 or params.top_k > 0
